"""One DEALER socket and the monitor that tells when its connection is made and lost."""

from enum import Enum

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol import auth
from protocol.config.services import TransportSection
from protocol.sockets import wire
from protocol.sockets.peers import numbered

RECONNECT_MS = 50
MAX_RECONNECT_MS = 1000
FLUSH_MS = 500


class LinkEvent(Enum):
    """A change of the connection."""

    READY = "ready"
    LOST = "lost"


class Link:
    """Owned by one thread after construction. `trouble` explains, for messages, what the last attempts met.

    Each opening has a routing id of its own. libzmq hands a routing id that comes again over to the new connection,
    and keeps the old one for ever if anything unread was still on its way there.
    """

    def __init__(
        self, address: str, *, routing_id: bytes, transport: TransportSection, keys: auth.ClientKeys | None
    ) -> None:
        self._address = address
        self._routing_id = routing_id
        self._num_opened = 0
        self._transport = transport
        self._keys = keys
        self._context: zmq.Context = zmq.Context()
        self.trouble = ""
        self.socket: zmq.Socket
        self._open()

    def _open(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        wire.configure(self.socket, self._transport)
        self.socket.setsockopt(zmq.ROUTING_ID, numbered(self._routing_id, self._num_opened))
        self._num_opened += 1
        # Without a connection nothing is queued below the application, where it would be lost unseen.
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        if self._keys is not None:
            auth.secure_client(self.socket, self._keys)
        self._monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self.socket.connect(self._address)

    def sockets(self) -> list[zmq.Socket]:
        """What to poll for reading: the data socket, then the monitor."""
        return [self.socket, self._monitor]

    def events(self) -> list[LinkEvent]:
        """Changes since the last call."""
        changes: list[LinkEvent] = []
        while self._monitor.poll(0):
            kind = recv_monitor_message(self._monitor)["event"]
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.trouble = ""
                changes.append(LinkEvent.READY)
            elif kind == zmq.EVENT_DISCONNECTED:
                changes.append(LinkEvent.LOST)
            else:
                self.trouble = " (something listens there but refuses these keys: compare transport.curve_dir)"
        return changes

    def reopen(self) -> None:
        """A new connection, for a server that holds the old one and does not answer."""
        self._close_socket(linger_ms=0)
        self._open()

    def flush(self) -> None:
        """Let queued messages leave when the socket is closed next."""
        self.socket.linger = FLUSH_MS

    def _close_socket(self, *, linger_ms: int | None) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=linger_ms)

    def close(self) -> None:
        if not self.socket.closed:
            self._close_socket(linger_ms=None)
            self._context.term()
