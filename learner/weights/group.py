"""Who receives weights: pure bookkeeping of members, without sockets or torch.

A member is a generator that asked to receive. Its life:

    join -> member --round: joined, staged, committed--> holds the version
            member --fails, with a reason--> a suspect: retried alone, up to MAX_ATTEMPTS per version
            member --says nothing by the deadline, or leaves--> fenced: out, until it joins again

Healthy members share one round. When a round fails, members that only saw the transport break are not suspects (the
first time); one that refused what came, or that said nothing, is, and cannot spoil the others' round twice.
A version counts as held only if this publisher brought it: a generator that comes back from another publisher or an
abandoned lineage gets the current one, whatever number it reports.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.messages import WeightJoin, WeightStatus

MAX_ATTEMPTS = 3
TRANSPORT_REASON = "transport: "
"""Start of the reason of a failure that may be another member's fault."""


@dataclass
class Member:
    """One receiving generator (one incarnation of it)."""

    name: str
    incarnation: str
    join: WeightJoin
    transport: str
    held: int | None = None
    attempts: int = 0
    breaks: int = 0
    status: WeightStatus | None = None
    last_error: str = ""

    def reached(self, phase: str, epoch: int, policy_version: int | None) -> bool:
        """Whether its newest report for this epoch (and version) is `phase`, or beyond it."""
        order = ("joined", "staged", "committed")
        status = self.status
        if status is None or status.epoch != epoch or status.phase == "failed":
            return False
        if policy_version is not None and status.policy_version != policy_version:
            return False
        return order.index(status.phase) >= order.index(phase)

    def failed(self, epoch: int) -> bool:
        """Whether it reported a failure in this epoch."""
        return self.status is not None and self.status.epoch == epoch and self.status.phase == "failed"


@dataclass
class Membership:
    """All members, and which of them are to be sent the target version next."""

    target: int | None = None
    members: dict[str, Member] = field(default_factory=dict)

    def set_target(self, policy_version: int) -> None:
        """A new version is to be sent; earlier failures are forgiven."""
        self.target = policy_version
        for member in self.members.values():
            member.attempts = member.breaks = 0
            member.held = None if member.held == policy_version else member.held

    def add(self, name: str, incarnation: str, join: WeightJoin, *, transport: str) -> Member:
        """A generator joins, or joins again; what the same incarnation was brought stays known."""
        before = self.members.get(name)
        member = Member(name=name, incarnation=incarnation, join=join, transport=transport)
        if before is not None and before.incarnation == incarnation and before.held == join.policy_version:
            member.held = before.held
        self.members[name] = member
        return member

    def remove(self, name: str, incarnation: str) -> None:
        """A generator left or fell silent; a newer incarnation of it stays."""
        member = self.members.get(name)
        if member is not None and member.incarnation == incarnation:
            del self.members[name]

    def record(self, name: str, incarnation: str, status: WeightStatus) -> None:
        """A member's report; a commit counts whenever it comes."""
        member = self.members.get(name)
        if member is None or member.incarnation != incarnation:
            return
        member.status = status
        if status.phase == "committed":
            member.held = status.policy_version
        elif status.phase == "failed":
            member.last_error = status.reason

    def next_receivers(self, *, alive: Callable[[str], bool] = lambda name: True) -> list[Member]:
        """Members of the next round: all healthy ones of one transport that lack the target, or one suspect.

        Args:
            alive: whether a suspect was heard lately; a silent one is not waited for.
        """
        if self.target is None:
            return []
        lacking = [m for m in self.members.values() if m.held != self.target and m.attempts < MAX_ATTEMPTS]
        healthy = [m for m in lacking if m.attempts == 0]
        if healthy:
            return [m for m in healthy if m.transport == healthy[0].transport]
        return [m for m in lacking if alive(m.name)][:1]

    def blame(self, receivers: list[Member], epoch: int) -> None:
        """After a failed round: who is a suspect from now on."""
        for member in receivers:
            if member.held == self.target:
                continue
            broken = member.failed(epoch) and member.last_error.startswith(TRANSPORT_REASON)
            if broken and len(receivers) > 1 and member.breaks == 0:
                member.breaks += 1
            else:
                member.attempts += 1

    def holders(self) -> list[str]:
        """Names of members that hold the target."""
        return sorted(m.name for m in self.members.values() if m.held == self.target)

    def given_up(self) -> dict[str, str]:
        """Members that failed the target MAX_ATTEMPTS times, with their last reason."""
        return {m.name: m.last_error for m in self.members.values() if m.attempts >= MAX_ATTEMPTS}


def choose_transport(join: WeightJoin, *, wanted: str, own_device_uuid: str) -> str | None:
    """The transport for one member, or None when there is no common one.

    auto: ipc when it uses the publisher's own GPU, nccl when both have GPUs, else gloo.

    Args:
        wanted: `weights.transport`.
        own_device_uuid: of the GPU the publisher sends from; "" = it has none.
    """
    if wanted != "auto":
        return wanted if wanted in join.transports else None
    supports: Callable[[str], bool] = lambda transport: transport in join.transports  # noqa: E731
    if own_device_uuid and own_device_uuid in join.device_uuids and supports("ipc"):
        return "ipc"
    if own_device_uuid and supports("nccl"):
        return "nccl"
    return "gloo" if supports("gloo") else None
