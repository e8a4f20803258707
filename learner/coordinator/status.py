"""What `slipstream status` shows: roles, what the run waits for, queues, staleness, rates, alarms."""

from collections import deque

from learner.coordinator.ledger import Ledger
from learner.coordinator.members import Members
from protocol.messages import Role

NEEDED: tuple[tuple[str, Role], ...] = (("generators", "generator"), ("reward", "rewardd"), ("trainer", "trainer"))
WINDOW_S = 60.0
SERIES_POINTS = 200


class Rates:
    """Tokens per second over the last minute, and recent points of a few metrics."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()  # tokens of each second of the last minute that had any
        self._tokens = 0
        self._since: float | None = None
        self.series: dict[str, deque[float]] = {}
        self.staleness: dict[int, int] = {}

    def answered(self, num_tokens: int, *, now: float) -> None:
        """An answer of this many sampled tokens arrived."""
        self._since = now if self._since is None else self._since
        self._tokens += num_tokens
        second = int(now)
        if self._seconds and self._seconds[-1][0] == second:
            num_tokens += self._seconds.pop()[1]
        self._seconds.append((second, num_tokens))
        self._forget(now)

    def tokens_per_s(self, *, now: float) -> float:
        """Sampled tokens per second over the last minute (or since the first answer)."""
        self._forget(now)
        span = min(WINDOW_S, now - self._since) if self._since is not None else 0.0
        return self._tokens / span if span > 0.0 else 0.0

    def _forget(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] < now - WINDOW_S:
            self._tokens -= self._seconds.popleft()[1]

    def point(self, name: str, value: float) -> None:
        """Adds a point to a series for live curves."""
        self.series.setdefault(name, deque(maxlen=SERIES_POINTS)).append(value)

    def trained(self, staleness: dict[int, int]) -> None:
        """Adds the staleness of a batch's tokens."""
        for age, count in staleness.items():
            self.staleness[age] = self.staleness.get(age, 0) + count


def queues(ledger: Ledger, *, now: float) -> dict[str, float]:
    """Depths of the coordinator's queues, in groups and slots, and the age of the oldest group in seconds."""
    groups = list(ledger.train.values())
    states = {"open": 0, "leased": 0, "answered": 0}
    for group in groups:
        for slot in group.slots:
            states[slot.state] += 1
    return {
        "groups_generating": sum(not group.complete for group in groups),
        "groups_waiting": sum(group.complete and group.batch_id is None for group in groups),
        "groups_training": sum(group.batch_id is not None for group in groups),
        "slots_open": states["open"],
        "slots_leased": states["leased"],
        "slots_answered": states["answered"],
        "eval_groups": len(ledger.eval),
        "oldest_age_s": max((now - group.created for group in groups), default=0.0),
    }


def missing_roles(members: Members) -> list[str]:
    """Roles the run cannot go on without and that have no live process (B40)."""
    return [name for name, role in NEEDED if not members.of_role(role)]


def idle_shares(members: Members) -> dict[str, float]:
    """Idle share (all causes but working) of trainer and generators, averaged over processes."""
    shares: dict[str, float] = {}
    for name, role in NEEDED:
        idle = [1.0 - m.idle_fractions.get("working", 0.0) for m in members.of_role(role) if m.idle_fractions]
        if idle:
            shares[f"idle/{name}"] = sum(idle) / len(idle)
    return shares
