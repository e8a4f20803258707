"""Servers and clients for tests of the sockets."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protocol.config.services import TransportSection
from protocol.messages import Ack, AnyBody, Goodbye, Heartbeat, HeartbeatAck, Hello, Refused, Welcome
from protocol.sockets import Client, Received, Server, make_hello

FAST = TransportSection(heartbeat_s=0.1, peer_timeout_s=0.8, connect_deadline_s=5.0, request_deadline_s=5.0)


def welcome(hello: Hello) -> Welcome | Refused:
    return Welcome(server="server", incarnation="1", run_id="r", policy_version=3, published_version=2)


def answer(received: Received) -> AnyBody | None:
    """What the test servers answer: heartbeats, and an Ack to everything else."""
    if isinstance(received.body, Heartbeat):
        return HeartbeatAck(policy_version=3, published_version=2)
    return None if isinstance(received.body, Goodbye) else Ack(detail="seen")


class ServerThread:
    """A server whose loop runs on a thread."""

    def __init__(
        self, address: str = "tcp://127.0.0.1:0", *, transport: TransportSection = FAST, accept=welcome, **options
    ) -> None:
        self.server = Server(address, name="server", transport=transport, accept=accept, **options)
        self.address = self.server.address
        self.received: list[Received] = []
        self.gone: list[str] = []
        self.answer: Callable[[Received], AnyBody | None] = answer
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            for received in self.server.poll(0.05):
                if not isinstance(received.body, Heartbeat):
                    self.received.append(received)
                body = self.answer(received)
                if body is not None:
                    self.server.send(received.peer, body, arrays=received.arrays, reply_to=received.envelope.msg_id)
            self.gone += [f"{peer.name}/{peer.incarnation}" for peer in self.server.gone()]

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        self.server.close(deadline_s=0.2)


@contextmanager
def serving(address: str = "tcp://127.0.0.1:0", **options) -> Iterator[ServerThread]:
    server = ServerThread(address, **options)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def connected(
    address: str, *, name: str = "client-0", transport: TransportSection = FAST, **options
) -> Iterator[Client]:
    client = Client(
        address, hello=options.pop("hello", None) or make_hello("client", name=name), transport=transport, **options
    )
    try:
        client.start(deadline_s=transport.connect_deadline_s)
        yield client
    finally:
        client.close(deadline_s=0)


@contextmanager
def process(module: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A python module as a process whose first output line is awaited, killed at the end."""
    child = subprocess.Popen(
        [sys.executable, "-m", module, *args], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
