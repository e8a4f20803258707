"""The connecting end: a DEALER served by a thread of its own, which outlives restarts of the server.

    state       connecting --Welcome--> up --silence | connection lost | "hello first"--> connecting
    connecting  the hello is repeated; new messages wait (bounded), each request up to its deadline
    up          messages flow, a heartbeat goes out each transport.heartbeat_s

When the state leaves `up`, requests that were sent and not answered fail at once with PeerUnreachable: what became of
them is not known, so the caller decides whether to repeat them (receivers count duplicates once).
"""

import heapq
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from itertools import count
from time import monotonic

import numpy as np
import zmq

from protocol import auth, framing
from protocol.config.services import TransportSection
from protocol.errors import PeerRefused, PeerUnreachable
from protocol.logs import event
from protocol.messages import (
    Ack,
    AnyBody,
    Envelope,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Refused,
    Welcome,
)
from protocol.sockets import wire
from protocol.sockets.link import Link, LinkEvent
from protocol.sockets.peers import Peer, Received, StallGuard, Stats, routing_id_of

log = logging.getLogger(__name__)

MAX_BURST = 512
DUPLICATE_HEARTBEATS = 4.0

Pending = tuple[int, list[framing.Frame], float, "Future[Received] | None"]
"""msg_id, frames, deadline (monotonic), future of a request."""


class Client:
    """Thread-safe. Callbacks run on the I/O thread and must be short.

    Args:
        address: of the server.
        hello: sent at each (re)connection; `attributes` may be replaced through the property `hello`.
        heartbeat: builds the heartbeat; None = a plain one that says "up".
        on_message: gets what is not the answer to a request, heartbeat acks included.
        on_welcome: gets the Welcome of each (re)connection.
        on_refused: gets a refusal after the start (for example: the name was taken over while this side was frozen).
        client_keys: CURVE keys; default: those of transport.curve_dir.
    """

    def __init__(
        self,
        address: str,
        *,
        hello: Hello,
        transport: TransportSection,
        heartbeat: Callable[[], Heartbeat] | None = None,
        on_message: Callable[[Received], None] | None = None,
        on_welcome: Callable[[Welcome], None] | None = None,
        on_refused: Callable[[PeerRefused], None] | None = None,
        client_keys: auth.ClientKeys | None = None,
    ) -> None:
        self.address = address
        self.hello = hello
        self.stats = Stats()
        self.last_ack: HeartbeatAck | None = None
        self.welcome: Welcome | None = None
        self.refusal: PeerRefused | None = None
        self._transport = transport
        self._heartbeat = heartbeat or (lambda: Heartbeat(state="up"))
        self._on_message = on_message
        self._on_welcome = on_welcome
        self._on_refused = on_refused
        self._limit = wire.max_bytes(transport)
        self._msg_ids = count(1)
        self._outbox: deque[Pending] = deque()
        self._sent: dict[int, tuple[float, Future[Received]]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._up = False
        self._hello_ids: set[int] = set()
        self._next_hello = 0.0
        self._next_heartbeat = 0.0
        self._last_heard = 0.0
        self._first_duplicate: float | None = None
        self._guard = StallGuard(transport.heartbeat_s)
        self._peer = Peer("", "server", "", b"", hello, 0.0)
        self._link = Link(
            address,
            routing_id=routing_id_of(hello),
            transport=transport,
            keys=client_keys or auth.client_keys(transport.curve_dir),
        )
        self._decided = threading.Event()
        self._closing: float | None = None
        self._close_reason = ""
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name=f"client {address}", daemon=True)

    # ------------------------------------------------------------ callers' side

    @property
    def connected(self) -> bool:
        """Whether the server has welcomed this client and was heard lately."""
        return self._up

    def start(self, *, deadline_s: float) -> Welcome:
        """Connect and wait for the welcome.

        Raises:
            PeerUnreachable: nothing answered at the address within the deadline.
            PeerRefused: the server refused the hello.
        """
        self._thread.start()
        decided = self._decided.wait(deadline_s)
        if self.refusal is not None and not self._up:
            refusal = self.refusal
            self.close(deadline_s=0)
            raise refusal
        if not decided or self.welcome is None:
            hint = self._link.trouble
            self.close(deadline_s=0)
            raise PeerUnreachable(f"no answer from {self.address} within {deadline_s:g} s{hint}: is it running there?")
        return self.welcome

    def request(
        self, body: AnyBody, *, arrays: Mapping[str, np.ndarray] | None = None, deadline_s: float
    ) -> "Future[Received]":
        """Send a message that will be answered; never blocks.

        The future fails with PeerUnreachable (connection lost or not there, too many messages waiting), PeerRefused
        (this client was refused) or TimeoutError (no answer by the deadline).

        Raises:
            FrameError, MessageTooLarge: the message cannot be sent.
        """
        future: Future[Received] = Future()
        self._offer(body, arrays, monotonic() + deadline_s, future)
        return future

    def send(self, body: AnyBody, *, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Send a message that needs no answer; never blocks.

        Raises:
            PeerUnreachable: transport.outbox_messages wait already, or the client is closed.
            FrameError, MessageTooLarge: the message cannot be sent.
        """
        self._offer(body, arrays, monotonic() + self._transport.request_deadline_s, None)

    def close(self, *, deadline_s: float, reason: str = "") -> int:
        """Wait up to the deadline for outstanding answers, say goodbye, stop the thread.

        Returns the number of requests left unanswered; their futures fail with PeerUnreachable.
        """
        if self._closed:
            return 0
        self._close_reason = reason
        self._closing = monotonic() + deadline_s
        if self._thread.is_alive():
            self._signal()
            self._thread.join(deadline_s + self._transport.peer_timeout_s)
        self._closed = True
        unanswered = self._fail_all(PeerUnreachable(f"client of {self.address} was closed"))
        if not self._thread.is_alive():
            self._link.close()
            os.close(self._wake)
        return unanswered

    def _offer(
        self,
        body: AnyBody,
        arrays: Mapping[str, np.ndarray] | None,
        deadline: float,
        future: "Future[Received] | None",
    ) -> None:
        msg_id = next(self._msg_ids)
        frames = framing.encode(Envelope(body=body, msg_id=msg_id), arrays, max_bytes=self._limit)
        self.stats.offered += 1
        error: Exception | None = None
        if self._closed or self._closing is not None:
            error = PeerUnreachable(f"client of {self.address} was closed")
        elif len(self._outbox) + len(self._sent) >= self._transport.outbox_messages:
            error = PeerUnreachable(
                f"{self.address}: {self._transport.outbox_messages} messages wait already (transport.outbox_messages)"
            )
        elif self.refusal is not None and not self._up:
            error = self.refusal
        if error is None:
            self._outbox.append((msg_id, frames, deadline, future))
            self._signal()
            if self._closed:
                self._fail_all(PeerUnreachable(f"client of {self.address} was closed"))
            return
        self.stats.refused += 1
        if future is None:
            raise error
        future.set_exception(error)

    def _signal(self) -> None:
        if not self._closed:
            os.eventfd_write(self._wake, 1)

    # ------------------------------------------------------------ the I/O thread

    def _serve(self) -> None:
        try:
            self._run()
        except Exception as error:
            log.critical("the client of %s failed", self.address, exc_info=True)
            self._closing = 0.0
            self._fail_all(PeerUnreachable(f"client of {self.address} failed: {error}"))
        finally:
            self._up = False

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        link_sockets: list[zmq.Socket] = []
        while True:
            now = monotonic()
            self._guard.turn(now)
            if self._closing is not None and (now >= self._closing or not (self._sent or self._outbox)):
                break
            self._tend(now)
            blocked = self._flush(now)
            sockets = self._link.sockets()
            if sockets != link_sockets:
                for old in link_sockets:
                    poller.unregister(old)
                for new in sockets:
                    poller.register(new, zmq.POLLIN)
                link_sockets = sockets
            poller.modify(sockets[0], zmq.POLLIN | zmq.POLLOUT if blocked else zmq.POLLIN)
            for source, _ in poller.poll(max(0, int((self._next_event(now) - now) * 1000) + 1)):
                if source == self._wake:
                    os.eventfd_read(self._wake)
            self._hear()
        if self._up:
            goodbye = Envelope(body=Goodbye(reason=self._close_reason), msg_id=next(self._msg_ids))
            self._try_send(framing.encode(goodbye))
            self._link.flush()

    def _tend(self, now: float) -> None:
        """Hellos, heartbeats and deadlines that are due."""
        if not self._up and now >= self._next_hello:
            hello_id = next(self._msg_ids)
            if self._try_send(framing.encode(Envelope(body=self.hello, msg_id=hello_id))):
                self._hello_ids.add(hello_id)
            self._next_hello = now + self._transport.heartbeat_s
        if self._up and now >= self._next_heartbeat:
            self._next_heartbeat = now + self._transport.heartbeat_s
            try:
                beat = self._heartbeat()
            except Exception:
                log.exception("heartbeat callback failed; no heartbeat is sent")
            else:
                self._try_send(framing.encode(Envelope(body=beat, msg_id=next(self._msg_ids))))
        if self._up and self._guard.may_judge(now) and now - self._last_heard > self._transport.peer_timeout_s:
            self._lose(f"silent for {now - self._last_heard:.1f} s", now)
            self._link.reopen()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, msg_id = heapq.heappop(self._deadlines)
            entry = self._sent.pop(msg_id, None)
            if entry is not None:
                self.stats.dropped += 1
                _fail(entry[1], TimeoutError(f"no answer from {self.address} by the deadline"))

    def _next_event(self, now: float) -> float:
        events = [self._next_heartbeat if self._up else self._next_hello]
        if self._up:
            events.append(max(self._last_heard + self._transport.peer_timeout_s, now + 0.01))
        if self._deadlines:
            events.append(self._deadlines[0][0])
        if self._outbox and not self._up:
            events.append(max(now + 0.01, min(entry[2] for entry in self._outbox)))
        if self._closing is not None:
            events.append(self._closing)
        return min(events)

    def _flush(self, now: float) -> bool:
        """Send what waits; True when the socket took no more."""
        if not self._up:
            self._expire_waiting(now)
            return False
        while self._outbox:
            msg_id, frames, deadline, future = self._outbox[0]
            if future is not None:
                self._sent[msg_id] = (deadline, future)
            if not self._try_send(frames):
                self._sent.pop(msg_id, None)
                return True
            self._outbox.popleft()
            self.stats.sent += 1
            if future is not None:
                heapq.heappush(self._deadlines, (deadline, msg_id))
        return False

    def _expire_waiting(self, now: float) -> None:
        for _ in range(len(self._outbox)):
            entry = self._outbox.popleft()
            if entry[2] > now:
                self._outbox.append(entry)
                continue
            self.stats.dropped += 1
            error = PeerUnreachable(f"{self.address} was not reachable by the deadline{self._link.trouble}")
            if entry[3] is not None:
                _fail(entry[3], error)
            else:
                event(log, logging.WARNING, "message dropped", reason=str(error))

    def _try_send(self, frames: list[framing.Frame]) -> bool:
        try:
            wire.send(self._link.socket, frames)
        except zmq.Again:
            return False
        return True

    def _hear(self) -> None:
        """Take what has come: connection events first, then messages."""
        now = monotonic()
        for change in self._link.events():
            if change is LinkEvent.READY:
                self._next_hello = now
            elif self._up:
                self._lose("connection lost", now)
                self._link.reopen()
        for _ in range(MAX_BURST):
            try:
                _, envelope, arrays, problem = wire.receive(self._link.socket, has_routing_id=False, limit=self._limit)
            except zmq.Again:
                return
            if envelope is None:
                self.stats.count_malformed(self.address)
                event(log, logging.WARNING, "malformed message dropped", sender=self.address, error=problem)
                continue
            self._take(envelope, arrays, now)

    def _take(self, envelope: Envelope, arrays: dict[str, np.ndarray], now: float) -> None:
        body = envelope.body
        self._last_heard = self._peer.last_heard = now
        self.stats.received += 1
        kind = type(body)
        if not self._up:
            if envelope.reply_to not in self._hello_ids:
                return
            if isinstance(body, Welcome):
                self._enter(body, now)
            elif isinstance(body, Refused):
                self._note_refusal(body, now)
            return
        if kind is Welcome or (kind is Ack and envelope.reply_to is None):
            return
        if isinstance(body, Refused) and body.code == "hello_first":
            self._lose("the server does not know this client any more", now)
            return
        received = Received(self._peer, envelope, arrays)
        entry = self._sent.pop(envelope.reply_to, None) if envelope.reply_to is not None else None
        if entry is not None:
            self.stats.acked += 1
            _resolve(entry[1], received)
            return
        if isinstance(body, HeartbeatAck):
            self.last_ack = body
        if self._on_message is not None:
            self._call(self._on_message, received)

    def _enter(self, welcome: Welcome, now: float) -> None:
        self._peer = Peer(welcome.server, "server", welcome.incarnation, b"", self.hello, now)
        self.welcome, self.refusal, self._first_duplicate = welcome, None, None
        self._next_heartbeat = now
        self._hello_ids.clear()
        self._up = True
        event(log, logging.INFO, "connected", address=self.address, server=welcome.server)
        if self._on_welcome is not None:
            self._call(self._on_welcome, welcome)
        self._decided.set()

    def _note_refusal(self, body: Refused, now: float) -> None:
        """A name may still be held by an earlier incarnation that is dying: give it a few heartbeats."""
        if body.code == "duplicate_name":
            self._first_duplicate = self._first_duplicate or now
            if now - self._first_duplicate < DUPLICATE_HEARTBEATS * self._transport.heartbeat_s:
                return
        self._next_hello = now + self._transport.peer_timeout_s
        self.refusal = PeerRefused(f"{self.address} refused: {body.reason}", code=body.code)
        event(log, logging.ERROR, "refused", address=self.address, code=body.code, reason=body.reason)
        first = not self._decided.is_set()
        self._decided.set()
        self._fail_all(self.refusal)
        if not first and self._on_refused is not None:
            self._call(self._on_refused, self.refusal)

    def _lose(self, why: str, now: float) -> None:
        """Leave the state up: what was sent and not answered fails, what still waits goes on waiting."""
        self._up = False
        self._next_hello = now
        event(log, logging.WARNING, "connection down", address=self.address, reason=why)
        sent, self._sent = self._sent, {}
        self._deadlines.clear()
        for _, future in sent.values():
            self.stats.dropped += 1
            _fail(future, PeerUnreachable(f"{self.address}: {why} before the answer came"))

    def _fail_all(self, error: Exception) -> int:
        failed = [future for _, future in self._sent.values()]
        self._sent.clear()
        self._deadlines.clear()
        while self._outbox:
            future = self._outbox.popleft()[3]
            self.stats.dropped += 1
            if future is not None:
                failed.append(future)
        for future in failed:
            _fail(future, error)
        return len(failed)

    def _call(self, callback: Callable, argument: object) -> None:
        try:
            callback(argument)
        except Exception:
            log.exception("callback of the client of %s failed", self.address)


def _fail(future: "Future[Received]", error: Exception) -> None:
    try:
        future.set_exception(error)
    except InvalidStateError:
        return


def _resolve(future: "Future[Received]", received: Received) -> None:
    try:
        future.set_result(received)
    except InvalidStateError:
        return
