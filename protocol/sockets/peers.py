"""What both ends of a socket know of each other."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from protocol.framing import Frame
from protocol.messages import AnyBody, Envelope, Hello

MAX_SENDERS = 1000


@dataclass(eq=False, slots=True)
class Peer:
    """The other end. For a client it is the server, under the name and incarnation of its Welcome.

    `last_heard` is on the monotonic clock of this process; `outbox` holds encoded messages the socket did not take;
    `opening` numbers the connection of a client that is in use.
    """

    name: str
    role: str
    incarnation: str
    routing_id: bytes
    hello: Hello
    last_heard: float
    opening: int = 0
    outbox: deque[list[Frame]] = field(default_factory=deque)


class Received(NamedTuple):
    """One message: arrays are read-only views of the received frames."""

    peer: Peer
    envelope: Envelope
    arrays: dict[str, np.ndarray]

    @property
    def body(self) -> AnyBody:
        return self.envelope.body


@dataclass
class Stats:
    """Counters of one socket.

    offered = sent + refused + dropped + waiting in outboxes, at any moment. `acked` counts received replies.
    `malformed` counts dropped frames by sender (routing id); `unknown` counts messages from peers without a hello.
    """

    offered: int = 0
    sent: int = 0
    refused: int = 0
    dropped: int = 0
    acked: int = 0
    received: int = 0
    unknown: int = 0
    malformed: Counter[str] = field(default_factory=Counter)

    def count_malformed(self, sender: str) -> None:
        """Counts a dropped message; senders beyond the first thousand are counted together."""
        self.malformed[sender if sender in self.malformed or len(self.malformed) < MAX_SENDERS else "others"] += 1

    def as_metrics(self, prefix: str) -> dict[str, float]:
        """Flat metrics, named prefix/counter."""
        names = ("offered", "sent", "refused", "dropped", "acked", "received", "unknown")
        metrics = {f"{prefix}/{name}": float(getattr(self, name)) for name in names}
        metrics[f"{prefix}/malformed"] = float(self.malformed.total())
        return metrics


class StallGuard:
    """Tells when the silence of peers may be judged.

    A process that was itself frozen finds every peer silent when it wakes. After a turn that came late by more than
    two heartbeats, peers get two heartbeats to be heard again.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._patience_s = 2 * heartbeat_s
        self._last_turn: float | None = None
        self._judge_after = 0.0

    def turn(self, now: float) -> None:
        """Note one turn of the owner's loop."""
        if self._last_turn is not None and now - self._last_turn > self._patience_s:
            self._judge_after = now + self._patience_s
        self._last_turn = now

    def may_judge(self, now: float) -> bool:
        return now >= self._judge_after


def routing_id_of(hello: Hello) -> bytes:
    """The routing id of a peer: name/incarnation."""
    return f"{hello.name}/{hello.incarnation}".encode()


def numbered(routing_id: bytes, opening: int) -> bytes:
    """The routing id of the `opening`-th connection that a client opened (0 is the first)."""
    return routing_id + b"#%d" % opening if opening else routing_id


def opening_of(routing_id: bytes, hello: Hello) -> int | None:
    """Which opening of this peer a connection is; None when it is not this peer's."""
    base, rest = routing_id_of(hello), routing_id[len(routing_id_of(hello)) :]
    if not routing_id.startswith(base) or (rest and not (rest[:1] == b"#" and rest[1:].isdigit())):
        return None
    return int(rest[1:]) if rest else 0
