"""In which order prompts are drawn: one permutation per pass, from the seed, with an exact position.

The state is (pass, position); both are committed with the group they issued, so a restart goes on with the very next
prompt. A pass holds every prompt once; a source weight w holds its prompts floor(w) times and once more with
probability frac(w), drawn from the seed as well.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Draw(NamedTuple):
    """The prompt at `position` of a pass; `row` counts usable rows of the data."""

    pass_number: int
    position: int
    row: int


def pass_order(
    num_prompts: int, *, seed: int, pass_number: int, shuffle: bool, weights: Sequence[float] | None = None
) -> NDArray[np.int64]:
    """Indices of the prompts of a pass, in order. `weights` [num_prompts], or None for all 1."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, pass_number])))
    indices = np.arange(num_prompts)
    if weights is not None:
        weight = np.asarray(weights, dtype=np.float64)
        extra = generator.random(num_prompts) < weight % 1.0
        indices = np.repeat(indices, weight.astype(np.int64) + extra)
    return generator.permutation(indices) if shuffle else indices


class PromptOrder:
    """Draws prompts pass by pass.

    Args:
        skip: prompts (by index) that are passed over, e.g. quarantined ones; asked at the moment of the draw.
        position: where to go on, (pass, position).
    """

    def __init__(
        self,
        num_prompts: int,
        *,
        seed: int,
        shuffle: bool,
        max_passes: int,
        weights: Sequence[float] | None = None,
        skip: Callable[[int], bool] = lambda index: False,
        position: tuple[int, int] = (0, 0),
    ) -> None:
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._max_passes = max_passes
        self._weights = weights
        self._skip = skip
        self._pass, self._position = position
        self._order = self._make_order()

    @property
    def position(self) -> tuple[int, int]:
        """(pass, position) of the next draw."""
        return self._pass, self._position

    @property
    def done(self) -> bool:
        """Whether the last pass has been drawn."""
        return self._pass >= self._max_passes or (
            self._pass == self._max_passes - 1 and self._position >= len(self._order)
        )

    def next(self) -> Draw | None:
        """The next prompt, or None after the last pass, or when a whole pass was skipped."""
        empty_passes = 0
        while self._pass < self._max_passes and empty_passes < 2:
            while self._position < len(self._order):
                draw = Draw(self._pass, self._position, int(self._order[self._position]))
                self._position += 1
                if not self._skip(draw.row):
                    return draw
            self._pass += 1
            self._position = 0
            self._order = self._make_order()
            empty_passes += 1
        return None

    def _make_order(self) -> NDArray[np.int64]:
        return pass_order(
            self._num_prompts,
            seed=self._seed,
            pass_number=self._pass,
            shuffle=self._shuffle,
            weights=self._weights,
        )
