"""Controllers of the entropy bonus. Pure Python; their state belongs in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FixedEntropy:
    """A coefficient that stays."""

    coef: float = 0.0

    def step(self, *, entropy: float) -> float:
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = float(state["coef"])


@dataclass
class AdaptiveEntropy:
    """Skywork-OR1's controller (arXiv 2505.22312) as in the paper, without the lag of its code.

    At update k with entropy ``e_k``: the bonus is ``alpha_k = c_k`` if ``e_k <= target`` else 0, then
    ``c_{k+1} = clip(c_k + delta if e_k < target else c_k - delta, min_coef, max_coef)``. ``e_k`` must be the exact
    entropy (nats per token, from the logits) of the policy at the start of update k over the tokens about to be
    trained, reduced over all ranks; the log-probs of stale samples are no estimate of it.
    """

    target: float
    delta: float
    max_coef: float
    min_coef: float = 0.0
    coef: float = 0.0

    def __post_init__(self) -> None:
        if self.target <= 0 or self.delta <= 0 or not 0 <= self.min_coef <= self.coef <= self.max_coef:
            raise ValueError(
                "adaptive entropy needs target > 0, delta > 0 and 0 <= min_coef <= coef <= max_coef, got "
                f"{self.target}, {self.delta} and {self.min_coef} <= {self.coef} <= {self.max_coef}"
            )

    def step(self, *, entropy: float) -> float:
        """Take ``e_k`` in, move the coefficient, and return ``alpha_k``, the bonus to use in this same update."""
        alpha = self.coef if entropy <= self.target else 0.0
        moved = self.coef + self.delta if entropy < self.target else self.coef - self.delta
        self.coef = min(max(moved, self.min_coef), self.max_coef)
        return alpha

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = float(state["coef"])
