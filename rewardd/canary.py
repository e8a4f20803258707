"""Known pairs of a lane: scored before it serves and at intervals while it does."""

from time import monotonic

from rewardd.scorers import Canary, Outcome

RETRY_ROUND_S = 30.0


class CanaryBoard:
    """One round at a time: `begin`, then `note` for each of its pairs.

    The lane serves (`has_passed`) after a round in which every pair came out as known. A pair that could not be judged
    proves nothing: the round ends without a pass and is repeated after 30 s; a lane that had passed serves on, since
    unjudged answers harm no one. A pair judged otherwise than known is a failure.
    """

    def __init__(self, canaries: list[Canary], *, interval_s: float) -> None:
        self.has_passed = not canaries
        self.is_over = not canaries
        self.next_round = monotonic() + interval_s
        self._canaries = canaries
        self._interval_s = interval_s
        self._waiting: set[int] = set()
        self._all_judged = True

    def begin(self) -> list[Canary]:
        """The pairs of a new round."""
        self.next_round = monotonic() + self._interval_s
        if self._waiting:
            return []
        self._waiting = set(range(len(self._canaries)))
        self._all_judged, self.is_over = True, not self._canaries
        return self._canaries

    def note(self, index: int, outcome: Outcome) -> str:
        """Take the outcome of pair `index`; returns what is wrong, or ""."""
        self._waiting.discard(index)
        self.is_over = not self._waiting
        canary = self._canaries[index]
        if outcome.kind == "unjudged":
            self._all_judged = False
        elif outcome.kind != canary.kind:
            return (
                f"{canary.task.scorer} says {outcome.kind} ({outcome.reason} {outcome.detail}) to a pair that is "
                f"{canary.kind}: {canary.task.response[:80]!r}"
            )
        if self.is_over:
            if self._all_judged:
                self.has_passed = True
            else:
                self.next_round = min(self.next_round, monotonic() + RETRY_ROUND_S)
        return ""
