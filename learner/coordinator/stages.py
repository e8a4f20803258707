"""Which lengths and sampling parameters a group is sampled with: stages of the run, and the evaluation's own."""

import hashlib
from collections.abc import Sequence
from typing import Literal

from protocol.config.run import EvaluationSection, RunSection, SamplingSection, Stage
from protocol.messages import SamplingParams

GroupRule = Literal["none", "equal_rewards"]


class StageSchedule:
    """Numbers the stages: 0 is the base configuration, k the k-th entry of `stages` (later ones override).

    `reached` is the highest stage that a metric has started early; it never goes back.
    """

    def __init__(self, stages: Sequence[Stage], *, reached: int = 0) -> None:
        self._stages = list(stages)
        self.reached = reached

    def at_update(self, update: int) -> int:
        """The stage of the batch that is the `update`-th (counting from 0)."""
        begun = [number for number, stage in enumerate(self._stages, start=1) if update >= stage.from_update]
        return max([self.reached, *begun])

    def observe(self, metrics: dict[str, float]) -> bool:
        """Starts the next stages early when their metric has crossed its threshold; True when one started."""
        before = self.reached
        for number, stage in enumerate(self._stages, start=1):
            value = metrics.get(stage.when_metric) if stage.when_metric else None
            if value is not None and value > stage.above:
                self.reached = max(self.reached, number)
        return self.reached > before

    def max_response_tokens(self, stage: int, default: int) -> int:
        values = [s.max_response_tokens for s in self._stages[:stage] if s.max_response_tokens is not None]
        return values[-1] if values else default

    def temperature(self, stage: int, default: float) -> float:
        values = [s.temperature for s in self._stages[:stage] if s.temperature is not None]
        return values[-1] if values else default

    def filter_groups(self, stage: int, default: GroupRule) -> GroupRule:
        values = [s.filter_groups for s in self._stages[:stage] if s.filter_groups is not None]
        return values[-1] if values else default


class SamplingRules:
    """Sampling parameters as a function of the group alone, so that a trajectory's can be checked at any time.

    Args:
        stop_token_ids: every end-of-sequence id (a stop is never left to the engine's defaults).
    """

    def __init__(
        self,
        *,
        sampling: SamplingSection,
        evaluation: EvaluationSection,
        run: RunSection,
        schedule: StageSchedule,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self._sampling = sampling
        self._evaluation = evaluation
        self._seed = run.seed
        self._schedule = schedule
        self._stop_token_ids = stop_token_ids

    @property
    def seeded(self) -> bool:
        """Whether every slot has a seed of its own (and thus a lease of its own)."""
        return self._sampling.seeded

    def filter_groups(self, stage: int, default: GroupRule) -> GroupRule:
        """The rule by which groups of this stage are filtered."""
        return self._schedule.filter_groups(stage, default)

    def params(self, *, purpose: str, variant: str, stage: int, group_id: int, slot: int) -> SamplingParams:
        """The parameters of one slot. Greedy is temperature 0."""
        temperature = self._schedule.temperature(stage, self._sampling.temperature)
        if purpose == "eval":
            temperature = 0.0 if variant == "greedy" else self._evaluation.temperature or temperature
        return SamplingParams(
            temperature=temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            min_p=self._sampling.min_p,
            max_tokens=self._schedule.max_response_tokens(stage, self._sampling.max_response_tokens),
            min_tokens=self._sampling.min_response_tokens,
            stop_token_ids=self._stop_token_ids,
            stop=tuple(self._sampling.stop),
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            seed=slot_seed(self._seed, group_id, slot) if self._sampling.seeded else None,
        )


def slot_seed(seed: int, group_id: int, slot: int) -> int:
    """A 31-bit seed of one slot, the same after any restart."""
    digest = hashlib.sha256(f"{seed}/{group_id}/{slot}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
