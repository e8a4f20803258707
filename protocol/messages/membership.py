"""Joining, leaving and heartbeats of every role."""

from msgspec import Struct

from protocol.messages.base import Body, RewarddAddress, Role


class Hello(Body, frozen=True):
    """First message on a connection. `incarnation` is fresh per process start; `attributes` holds plain facts of the
    role: a rewardd's or publisher's `address`, a generator's `num_workers`, `transports`, `host`, `device`."""

    role: Role
    name: str
    incarnation: str
    protocol_version: int
    host: str
    pid: int
    run_id: str | None = None
    tokenizer_hash: str | None = None
    attributes: dict[str, str | int | float | bool | list[str]] = {}


class Welcome(Body, frozen=True):
    """The coordinator's (or any server's) answer to an accepted hello."""

    server: str
    incarnation: str
    run_id: str
    policy_version: int
    published_version: int
    rewardd: list[RewarddAddress] = []
    weights_address: str | None = None
    run_state: str = "running"


class Refused(Body, frozen=True):
    """The answer to anything that is not accepted. `code` is a stable slug, `reason` one line for a person."""

    code: str
    reason: str


class SlotProgress(Struct, kw_only=True, frozen=True):
    """Progress of one leased slot: tokens sampled so far (monotone within an attempt)."""

    group_id: int
    slot: int
    attempt: int
    num_tokens: int


class SlotRef(Struct, kw_only=True, frozen=True):
    """One attempt at one slot of a group."""

    group_id: int
    slot: int
    attempt: int


class Heartbeat(Body, frozen=True):
    """Sent by every client each `transport.heartbeat_s`. `progress_age_s` is the age of the last work done;
    `idle_fractions` maps a cause of idleness to its share of the last minute (sums to 1 with "working")."""

    state: str
    waiting_for: str = ""
    policy_version: int = -1
    progress_age_s: float = 0.0
    progress: list[SlotProgress] = []
    idle_fractions: dict[str, float] = {}
    metrics: dict[str, float] = {}


class HeartbeatAck(Body, frozen=True):
    """`command` is "" | "drain" | "stop" (run finished or asked to stop). `cancel` lists slots moved elsewhere."""

    policy_version: int
    published_version: int
    rewardd: list[RewarddAddress] = []
    weights_address: str | None = None
    cancel: list[SlotRef] = []
    command: str = ""
    run_state: str = "running"


class Goodbye(Body, frozen=True):
    """An orderly leave: leases go back at once."""

    reason: str


class Ack(Body, frozen=True):
    """Generic positive answer; `detail` may say what was counted."""

    detail: str = ""
