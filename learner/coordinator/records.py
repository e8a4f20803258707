"""What the coordinator keeps in memory of groups in flight: groups, slots, answers, partial answers."""

from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from learner.coordinator.journal import Location
from protocol.messages import FinishReason, Purpose, VerdictKind

SlotState = Literal["open", "leased", "answered"]
EndState = Literal["trained", "filtered", "retired", "quarantined", "evaluated"]
Variant = Literal["sampled", "greedy"]


class Answer(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """An accepted trajectory without its arrays. `version_counts` maps a policy version to the number of tokens that
    the policy sampled with it; `rewardd` and `generator` name who made it."""

    num_prompt_tokens: int
    num_response_tokens: int
    finish_reason: FinishReason
    score: float
    verdict: VerdictKind
    version_counts: dict[int, int]
    temperature: float
    seconds: float = 0.0
    reason: str = ""
    generator: str = ""
    components: dict[str, float] = {}

    @property
    def min_version(self) -> int:
        return min(self.version_counts, default=-1)

    @property
    def max_version(self) -> int:
        return max(self.version_counts, default=-1)


@dataclass(slots=True)
class Partial:
    """Tokens that an earlier attempt sampled; `version` is the oldest of their policy versions."""

    location: Location
    num_tokens: int
    version: int


@dataclass(slots=True)
class Slot:
    """One of a group's n answers.

    `attempt` counts leases of the slot (0 = never leased), `failures` those that ended badly. While leased:
    `holder` is the generator's name/incarnation, `deadline` and `last_deadline` are clock times (the first is renewed
    by progress), `version` is the policy version it was leased at, `num_tokens` the progress reported, `recalled` is
    set once the holder was asked to hand it back.
    """

    group_id: int
    slot: int
    state: SlotState = "open"
    attempt: int = 0
    failures: int = 0
    holder: str = ""
    deadline: float = 0.0
    last_deadline: float = 0.0
    version: int = -1
    num_tokens: int = 0
    recalled: bool = False
    answer: Answer | None = None
    location: Location | None = None
    partial: Partial | None = None


@dataclass(slots=True)
class Group:
    """A prompt to be answered `len(slots)` times. `overdue` is set once a lease of it expired: it no longer holds
    back younger groups. `round` numbers the evaluation of an eval group."""

    group_id: int
    purpose: Purpose
    prompt_id: str
    pass_number: int
    position: int
    stage: int
    variant: Variant
    created: float
    slots: list[Slot] = field(default_factory=list)
    batch_id: int | None = None
    num_answered: int = 0
    overdue: bool = False

    @property
    def complete(self) -> bool:
        return self.num_answered == len(self.slots)

    @property
    def min_version(self) -> int | None:
        """Oldest policy version that any of its tokens has, or may have; None before the first lease."""
        versions = [slot.version for slot in self.slots if slot.version >= 0]
        return min(versions, default=None)

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of all its answers."""
        return sum(a.num_prompt_tokens + a.num_response_tokens for s in self.slots if (a := s.answer) is not None)
