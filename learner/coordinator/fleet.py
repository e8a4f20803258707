"""Figures of all instances of a role together, averaged over the time between two batches."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from learner.coordinator.members import Member, Members
from protocol.messages import Role

ROLES: tuple[tuple[str, Role], ...] = (("trainer", "trainer"), ("generators", "generator"), ("reward", "rewardd"))


class FleetMeter:
    """Looked at once a second; `take` gives the means since the last `take` (those of before while there are none)."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._last: dict[str, float] = {}

    def observe(self, members: Members) -> None:
        """Adds what the live processes said last."""
        figures = dict(fleet_figures(members))
        for name, value in figures.items():
            self._sums[name] += value
        self._counts.update({_family(name) for name in figures})

    def take(self) -> dict[str, float]:
        """Means by name; the next call begins anew."""
        if self._counts:
            self._last = {name: total / self._counts[_family(name)] for name, total in self._sums.items()}
            self._sums.clear()
            self._counts.clear()
        return dict(self._last)


def _family(name: str) -> str:
    """What is counted together: a cause that a role does not name at a look had no time then."""
    return name.rpartition("/")[0] if name.startswith("time_share/") else name


def fleet_figures(members: Members) -> Iterator[tuple[str, float]]:
    """(name, value) of this moment."""
    for roles, role in ROLES:
        told = [member for member in members.of_role(role) if member.idle_fractions]
        shares: defaultdict[str, float] = defaultdict(float)
        for member in told:
            for cause, share in member.idle_fractions.items():
                shares[_plain(cause)] += share / len(told)
        yield from ((f"time_share/{roles}/{cause}", share) for cause, share in shares.items())
    generators, daemons = members.of_role("generator"), members.of_role("rewardd")
    yield "fleet/generators", float(len(generators))
    yield "fleet/reward_daemons", float(len(daemons))
    slots = sum(_values(generators, "generator/slots"))
    if slots:
        yield "fleet/slots_used", sum(_values(generators, "generator/running")) / slots
    for name, source, who in (
        ("fleet/kv_demand", "generator/kv_demand", generators),
        ("fleet/reward_queue_depth", "rewardd/queue_depth", daemons),
        ("fleet/reward_queue_oldest_s", "rewardd/queue_oldest_s", daemons),
    ):
        values = _values(who, source)
        if values:
            yield name, max(values)


def _values(members: list[Member], name: str) -> list[float]:
    return [member.metrics[name] for member in members if name in member.metrics]


def _plain(cause: str) -> str:
    return {"publishing": "weights", "saving": "checkpoint"}.get(cause, cause.removeprefix("waiting for "))
