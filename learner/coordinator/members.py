"""Who takes part in the run: what each live role said last, and how fast each generator is."""

from dataclasses import dataclass, field
from statistics import median

from protocol.messages import Heartbeat, Hello, RewarddAddress, Role, RoleStatus

RATE_HALF_LIFE_S = 20.0
SLOW_BELOW = 0.5


@dataclass
class Member:
    """One process. `slot_rate` is tokens per second and running slot of a generator (0 = not known yet);
    `abandoned_version` is set while it may hold weights of an
    abandoned lineage."""

    hello: Hello
    since: float
    last_heard: float
    state: str = "up"
    waiting_for: str = ""
    version: int = -1
    progress_age_s: float = 0.0
    idle_fractions: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    slot_rate: float = 0.0
    rate_time: float = 0.0
    abandoned_version: int | None = None

    @property
    def key(self) -> str:
        """name/incarnation: one process start."""
        return f"{self.hello.name}/{self.hello.incarnation}"

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def role(self) -> Role:
        return self.hello.role

    def heard(self, beat: Heartbeat, *, now: float) -> None:
        """Takes over a heartbeat."""
        if (beat.state, beat.waiting_for) != (self.state, self.waiting_for):
            self.since = now
        self.state, self.waiting_for, self.version = beat.state, beat.waiting_for, beat.policy_version
        self.progress_age_s, self.idle_fractions = beat.progress_age_s, beat.idle_fractions
        self.metrics = beat.metrics
        self.last_heard = now

    def sampled(self, num_tokens: int, slot_seconds: float, *, now: float) -> None:
        """Updates the rate from tokens sampled in `slot_seconds` (running slots times seconds)."""
        if slot_seconds <= 0.0:
            return
        rate = num_tokens / slot_seconds
        weight = 0.5 ** ((now - self.rate_time) / RATE_HALF_LIFE_S) if self.slot_rate > 0.0 else 0.0
        self.slot_rate = weight * self.slot_rate + (1.0 - weight) * rate
        self.rate_time = now

    def status(self, *, now: float) -> RoleStatus:
        return RoleStatus(
            role=self.role,
            name=self.name,
            state=self.state,
            since=self.since,
            version=self.version,
            progress_age_s=self.progress_age_s + max(0.0, now - self.last_heard),
            waiting_for=self.waiting_for,
            idle_fractions=self.idle_fractions,
            metrics=self.metrics,
            pid=self.hello.pid,
            host=self.hello.host,
        )


class Members:
    """Live processes by key, and those that have gone, by name, for status."""

    def __init__(self) -> None:
        self._live: dict[str, Member] = {}
        self.gone: dict[str, RoleStatus] = {}

    def join(self, hello: Hello, *, now: float) -> Member:
        """A process said hello (again)."""
        key = f"{hello.name}/{hello.incarnation}"
        if key in self._live:
            self._live[key].hello = hello
        else:
            self._live[key] = Member(hello, since=now, last_heard=now)
        self.gone.pop(hello.name, None)
        return self._live[key]

    def leave(self, key: str, *, now: float) -> Member | None:
        """A process left, fell silent or was replaced."""
        member = self._live.pop(key, None)
        if (
            member is not None
            and member.role != "client"
            and not any(m.name == member.name for m in self._live.values())
        ):
            member.state, member.waiting_for, member.since = "gone", "", now
            self.gone[member.name] = member.status(now=now)
        return member

    def get(self, key: str) -> Member | None:
        return self._live.get(key)

    def of_role(self, role: Role) -> list[Member]:
        return [member for member in self._live.values() if member.role == role]

    def rewardd(self) -> list[RewarddAddress]:
        """Live reward daemons that told their address."""
        found = []
        for member in self.of_role("rewardd"):
            address = member.hello.attributes.get("address")
            if isinstance(address, str) and address:
                found.append(RewarddAddress(name=member.name, address=address))
        return found

    def weights_address(self) -> str | None:
        """Control address of the publisher, from the trainer's hello."""
        for member in self.of_role("trainer"):
            address = member.hello.attributes.get("weights_address")
            if isinstance(address, str) and address:
                return address
        return None

    def usual_rate(self) -> float:
        """Median tokens per second and slot over the live generators whose rate is known; 0 when none is."""
        rates = [m.slot_rate for m in self.of_role("generator") if m.slot_rate > 0.0]
        return median(rates) if rates else 0.0

    def is_slow(self, member: Member) -> bool:
        """Whether a generator is much slower, per slot, than its fellows."""
        return 0.0 < member.slot_rate < SLOW_BELOW * self.usual_rate()

    def share(self, member: Member) -> float:
        """A generator's part of the fleet's rate per slot, in (0, 1]; unknown rates count as the usual one."""
        usual = self.usual_rate()
        if usual == 0.0:
            return 1.0
        total = sum(m.slot_rate or usual for m in self.of_role("generator"))
        return (member.slot_rate or usual) / total
