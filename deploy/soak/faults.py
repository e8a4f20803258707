"""Faults drawn from a seed: against a process of the crew, or in the network in front of the coordinator."""

import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from time import monotonic

from deploy.soak.crew import Crew, Member
from deploy.soak.toxic import ToxicProxy, Toxics
from protocol.logs import event

log = logging.getLogger(__name__)

LONGEST_TOXIC_S = 4.0


class Faults:
    """Does one fault at a time (`strike`); `counts` says how many of each kind.

    Args:
        longest_s: longest freeze of a process and stall of the network; above the peer timeout, so that some are
            noticed and some are not.
    """

    def __init__(self, crew: Crew, proxy: ToxicProxy, *, seed: int, longest_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self._crew = crew
        self._proxy = proxy
        self._random = random.Random(seed)
        self._longest_s = longest_s
        self._heal_at = float("inf")
        self._kinds: list[tuple[int, str, Callable[[], bool]]] = [
            (4, "kills", self._kill),
            (4, "freezes", self._freeze),
            (1, "stops", self._terminate),
            (2, "lossy spells", lambda: self._infect(Toxics(drop=self._random.uniform(0.02, 0.3)))),
            (2, "doubling spells", lambda: self._infect(Toxics(duplicate=self._random.uniform(0.02, 0.3)))),
            (1, "slow spells", lambda: self._infect(Toxics(delay_s=self._random.uniform(0.01, 0.2)))),
            (1, "stalls", lambda: self._infect(Toxics(stalled=True), longest_s=self._longest_s)),
            (1, "cuts", self._cut),
        ]

    def pause_s(self, mean_s: float) -> float:
        """How long until the next fault."""
        return self._random.uniform(0.3, 1.7) * mean_s

    def strike(self) -> None:
        """One fault, drawn by weight."""
        _, name, act = self._random.choices(self._kinds, [weight for weight, _, _ in self._kinds])[0]
        self.counts[name] += act()

    def tend(self) -> None:
        """Heals the network when its time is up."""
        if monotonic() >= self._heal_at:
            self.heal()

    def heal(self) -> None:
        """A network without faults."""
        self._proxy.toxics, self._heal_at = Toxics(), float("inf")

    def _victim(self, *, to_end: bool) -> Member | None:
        now = monotonic()
        standing = [
            member
            for member in self._crew.members.values()
            if member.is_up and not (to_end and now < member.spared_until)
        ]
        return self._random.choice(standing) if standing else None

    def _kill(self) -> bool:
        if (member := self._victim(to_end=True)) is None:
            return False
        event(log, logging.INFO, "kill", role=member.name)
        self._crew.kill(member)
        return True

    def _terminate(self) -> bool:
        if (member := self._victim(to_end=True)) is None:
            return False
        event(log, logging.INFO, "stop", role=member.name)
        member.process.terminate()
        return True

    def _freeze(self) -> bool:
        if (member := self._victim(to_end=False)) is None:
            return False
        seconds = self._random.uniform(0.2, self._longest_s)
        event(log, logging.INFO, "freeze", role=member.name, seconds=round(seconds, 2))
        self._crew.freeze(member, seconds=seconds)
        return True

    def _cut(self) -> bool:
        event(log, logging.INFO, "network cut")
        self._proxy.cut()
        return True

    def _infect(self, toxics: Toxics, *, longest_s: float = LONGEST_TOXIC_S) -> bool:
        self._proxy.toxics = toxics
        self._heal_at = monotonic() + self._random.uniform(0.5, longest_s)
        event(log, logging.INFO, "network", **asdict(toxics))
        return True
