"""The listening end: a ROUTER that knows its peers by name and incarnation and never blocks on any of them."""

import logging
import socket as sockets
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from time import monotonic
from urllib.parse import urlsplit

import numpy as np
import psutil
import zmq

from protocol import auth, framing
from protocol.config.services import TransportSection
from protocol.errors import UserError
from protocol.logs import event
from protocol.messages import Ack, AnyBody, Envelope, Goodbye, Hello, Refused, Welcome
from protocol.sockets import wire
from protocol.sockets.peers import Peer, Received, StallGuard, Stats, opening_of
from protocol.versions import check_versions

log = logging.getLogger(__name__)

MAX_BURST = 32
"""Messages of one poll. Few, so that they are handled while still in the processor's cache (512 halve the rate)."""
RETRY_S = 0.005
LIVE_HEARTBEATS = 2.5
ADVERTISED_BY = {"address": "rewardd.listen", "weights_address": "weights.listen"}


class Server:
    """Used by one thread: its owner calls `poll` in a loop and answers what comes out of it.

    Answers hellos itself: another protocol version or tokenizer hash, a name a live peer holds, or an address that
    cannot be reached are refused; what passes goes to `accept`. A peer under the same name replaces an earlier
    incarnation whose connection is gone or which was silent for 2.5 heartbeats.

    Args:
        address: tcp://host:port (port 0 = any free one) or ipc://path to bind.
        name: name of the server, for messages.
        accept: decides on a hello that passed the checks above.
        server_keys: CURVE keys; default: those of transport.curve_dir.
        tokenizer_hash: compared with the hello's when both are known.
        setting: dotted name of the setting `address` comes from, for messages.

    Raises:
        UserError: the address is off loopback without keys, or cannot be bound (naming who holds it).
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        transport: TransportSection,
        accept: Callable[[Hello], Welcome | Refused],
        server_keys: auth.ServerKeys | None = None,
        tokenizer_hash: str | None = None,
        setting: str = "listen",
    ) -> None:
        keys = server_keys or auth.server_keys(transport.curve_dir)
        auth.check_listen(address, setting=setting, has_keys=keys is not None)
        self.name = name
        self.stats = Stats()
        self._transport = transport
        self._accept = accept
        self._tokenizer_hash = tokenizer_hash
        self._limit = wire.max_bytes(transport)
        self._msg_ids = count(1)
        self._by_id: dict[bytes, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self._waiting: dict[bytes, Peer] = {}
        self._gone: list[Peer] = []
        self._guard = StallGuard(transport.heartbeat_s)
        self._next_judgement = 0.0
        self._context: zmq.Context = zmq.Context()
        self._authenticator = None
        self._socket = self._context.socket(zmq.ROUTER)
        wire.configure(self._socket, transport)
        self._socket.router_mandatory = True
        # A client that reconnects before its old connection is seen to be dead must not be ignored in silence.
        self._socket.router_handover = True
        if keys is not None:
            self._authenticator = auth.secure_server(self._socket, self._context, keys)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._shut(0)
            raise UserError(f"{setting} = {address} cannot be bound: {error.strerror}{_holder(address)}") from error
        self.address: str = str(self._socket.get_string(zmq.LAST_ENDPOINT))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._extra: tuple[zmq.Socket | int, ...] = ()

    def poll(self, timeout_s: float, *, extra: Sequence[zmq.Socket | int] = ()) -> list[Received]:
        """Messages that have come (at most 32); waits up to `timeout_s` for the first one or for an `extra` socket
        or file descriptor to become readable."""
        self._watch(tuple(extra))
        self._flush()
        self._guard.turn(monotonic())
        if self._waiting:
            timeout_s = min(timeout_s, RETRY_S)
        self._poller.poll(max(0, int(timeout_s * 1000)))
        now = monotonic()
        self._guard.turn(now)
        received: list[Received] = []
        for _ in range(MAX_BURST):
            try:
                incoming = wire.receive(self._socket, has_routing_id=True, limit=self._limit)
            except zmq.Again:
                break
            message = self._take(incoming, now)
            if message is not None:
                received.append(message)
        if now >= self._next_judgement:
            self._judge(now)
        self._flush()
        return received

    def send(
        self,
        peer: Peer | str,
        body: AnyBody,
        *,
        arrays: Mapping[str, np.ndarray] | None = None,
        reply_to: int | None = None,
    ) -> bool:
        """Send or queue a message; False (counted, logged) when the peer is not known or its outbox is full.

        Raises:
            FrameError, MessageTooLarge: the message can't be sent to anyone.
        """
        envelope = Envelope(body=body, msg_id=next(self._msg_ids), reply_to=reply_to)
        frames = framing.encode(envelope, arrays, max_bytes=self._limit)
        self.stats.offered += 1
        known = self._by_name.get(peer) if isinstance(peer, str) else self._by_id.get(peer.routing_id)
        if known is None:
            self.stats.refused += 1
            name = peer if isinstance(peer, str) else peer.name
            event(log, logging.WARNING, "no such peer", peer=name, body=type(body).__name__)
            return False
        if len(known.outbox) >= self._transport.outbox_messages:
            self.stats.refused += 1
            event(log, logging.WARNING, "outbox full: peer does not read", peer=known.name)
            return False
        if known.outbox or not self._push(known, frames):
            known.outbox.append(frames)
            self._waiting[known.routing_id] = known
        return True

    def peers(self) -> list[Peer]:
        """Live peers."""
        return list(self._by_name.values())

    def peer(self, name: str) -> Peer | None:
        """The live peer of this name."""
        return self._by_name.get(name)

    def gone(self) -> list[Peer]:
        """Peers that left, fell silent or were replaced since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def close(self, *, deadline_s: float) -> None:
        """Send what waits in outboxes, for up to `deadline_s`, and close."""
        end = monotonic() + deadline_s
        while self._waiting and monotonic() < end:
            self._flush()
            self._poller.poll(int(RETRY_S * 1000))
            for _ in range(MAX_BURST):
                try:
                    wire.receive(self._socket, has_routing_id=True, limit=self._limit)
                except zmq.Again:
                    break
        for peer in list(self._waiting.values()):
            self._discard_outbox(peer)
        self._shut(max(0, int(min(deadline_s, end - monotonic() + 0.2) * 1000)))

    # ------------------------------------------------------------ receiving

    def _take(self, incoming: wire.Incoming, now: float) -> Received | None:
        routing_id, envelope, arrays, problem = incoming
        if envelope is None:
            sender = routing_id.decode("utf-8", "replace")
            self.stats.count_malformed(sender)
            event(log, logging.WARNING, "malformed message dropped", sender=sender, error=problem)
            return None
        peer = self._by_id.get(routing_id)
        body = envelope.body
        if type(body) is Hello:
            self._greet(routing_id, body, envelope.msg_id, now)
            return None
        if peer is None:
            self.stats.unknown += 1
            reason = f"{self.name} has no hello of this incarnation"
            self._answer(routing_id, Refused(code="hello_first", reason=reason), envelope.msg_id)
            return None
        peer.last_heard = now
        self.stats.received += 1
        if envelope.reply_to is not None:
            self.stats.acked += 1
        elif type(body) is Goodbye:
            self._remove(peer, body.reason or "goodbye")
        return Received(peer, envelope, arrays)

    def _greet(self, routing_id: bytes, hello: Hello, msg_id: int, now: float) -> None:
        answer: Welcome | Refused | None = self._refusal(routing_id, hello, now)
        if answer is None:
            answer = self._accept(hello)
        if isinstance(answer, Refused):
            event(log, logging.ERROR, "hello refused", peer=hello.name, code=answer.code, reason=answer.reason)
            self._answer(routing_id, answer, msg_id)
            return
        old = self._by_name.get(hello.name)
        if old is not None and old.incarnation == hello.incarnation:
            old.hello, old.last_heard = hello, now
            self._move(old, routing_id)
        else:
            if old is not None:
                self._remove(old, f"replaced by incarnation {hello.incarnation}")
            opening = opening_of(routing_id, hello) or 0
            peer = Peer(hello.name, hello.role, hello.incarnation, routing_id, hello, now, opening)
            self._by_id[routing_id] = self._by_name[hello.name] = peer
            event(log, logging.INFO, "peer joined", peer=hello.name, incarnation=hello.incarnation, host=hello.host)
        self._answer(routing_id, answer, msg_id)

    def _move(self, peer: Peer, routing_id: bytes) -> None:
        """The same process over another connection."""
        self._by_id[routing_id] = self._by_id.pop(peer.routing_id)
        if self._waiting.pop(peer.routing_id, None) is not None:
            self._waiting[routing_id] = peer
        peer.routing_id, peer.opening = routing_id, opening_of(routing_id, peer.hello) or 0

    def _refusal(self, routing_id: bytes, hello: Hello, now: float) -> Refused | None:
        opening = opening_of(routing_id, hello)
        if opening is None:
            return Refused(code="routing_id", reason=f"routing id is not {hello.name}/{hello.incarnation}")
        refusal = check_versions(hello, tokenizer_hash=self._tokenizer_hash)
        if refusal is not None:
            return refusal
        for attribute, setting in ADVERTISED_BY.items():
            value = hello.attributes.get(attribute)
            if isinstance(value, str) and value:
                away = hello.host != sockets.gethostname()
                if auth.is_wildcard(value) or (away and auth.is_local_only(value)):
                    return Refused(
                        code="advertised_address",
                        reason=f"{setting}: {hello.name} on {hello.host} advertises {value}, "
                        "which others cannot connect to; name an address of that machine",
                    )
        old = self._by_name.get(hello.name)
        if old is not None and old.incarnation == hello.incarnation and opening < old.opening:
            return Refused(code="old_connection", reason=f"{hello.name} has opened a newer connection")
        if old is not None and old.incarnation != hello.incarnation and self._is_alive(old, now):
            return Refused(
                code="duplicate_name",
                reason=f"a live {old.role} on {old.hello.host} (pid {old.hello.pid}) already has the name "
                f"{hello.name}: give each process its own --name",
            )
        return None

    def _is_alive(self, peer: Peer, now: float) -> bool:
        """Whether a peer was heard lately and still has its connection (a ping to a closed one fails at once)."""
        if now - peer.last_heard > LIVE_HEARTBEATS * self._transport.heartbeat_s:
            return False
        try:
            wire.send(self._socket, [peer.routing_id, *framing.encode(Envelope(body=Ack(), msg_id=0))])
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    # ------------------------------------------------------------ sending

    def _answer(self, routing_id: bytes, body: Welcome | Refused, reply_to: int) -> None:
        """Answer a peer that may have no outbox: given up when its queue is full, as it will ask again."""
        envelope = Envelope(body=body, msg_id=next(self._msg_ids), reply_to=reply_to)
        self.stats.offered += 1
        try:
            wire.send(self._socket, [routing_id, *framing.encode(envelope)])
            self.stats.sent += 1
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.stats.dropped += 1

    def _push(self, peer: Peer, frames: list[framing.Frame]) -> bool:
        """Hand one message to the socket; False when its queue is full or the connection is away for the moment
        (a peer that does not come back within the peer timeout is gone, and its outbox with it)."""
        try:
            wire.send(self._socket, [peer.routing_id, *frames])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        self.stats.sent += 1
        return True

    def _flush(self) -> None:
        for peer in list(self._waiting.values()):
            while peer.outbox and self._push(peer, peer.outbox[0]):
                peer.outbox.popleft()
            if not peer.outbox:
                del self._waiting[peer.routing_id]

    def _discard_outbox(self, peer: Peer) -> None:
        self.stats.dropped += len(peer.outbox)
        peer.outbox.clear()
        self._waiting.pop(peer.routing_id, None)

    # ------------------------------------------------------------ membership and clean-up

    def _judge(self, now: float) -> None:
        self._next_judgement = now + self._transport.heartbeat_s / 4
        if not self._guard.may_judge(now):
            return
        for peer in self.peers():
            silent_s = now - peer.last_heard
            if silent_s > self._transport.peer_timeout_s:
                self._remove(peer, f"silent for {silent_s:.1f} s")

    def _remove(self, peer: Peer, reason: str) -> None:
        self._discard_outbox(peer)
        self._by_id.pop(peer.routing_id, None)
        if self._by_name.get(peer.name) is peer:
            del self._by_name[peer.name]
        self._gone.append(peer)
        event(log, logging.WARNING, "peer gone", peer=peer.name, incarnation=peer.incarnation, reason=reason)

    def _watch(self, extra: tuple[zmq.Socket | int, ...]) -> None:
        if extra == self._extra:
            return
        for source in self._extra:
            self._poller.unregister(source)
        for source in extra:
            self._poller.register(source, zmq.POLLIN)
        self._extra = extra

    def _shut(self, linger_ms: int) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket.close(linger=linger_ms)
        self._context.term()


def _holder(address: str) -> str:
    """ ", held by NAME (pid N)" when the process listening on the port can be seen, else ""."""
    port = urlsplit(address).port if address.startswith("tcp://") and not address.endswith(":*") else None
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f", held by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        return ""
    return ""
