"""Requests to the coordinator from the command line."""

import os
from types import TracebackType
from typing import Self, TypeVar

from protocol.auth import client_keys
from protocol.config import Config
from protocol.errors import PeerRefused
from protocol.messages import Ack, AnyBody, ControlRequest, Refused, StatusReply, StatusRequest
from protocol.sockets import Client
from protocol.versions import make_hello

Reply = TypeVar("Reply")


class OperatorClient:
    """A connection of the command line to the coordinator; use as a context manager.

    Raises (on entering and on every request): PeerUnreachable naming the address, PeerRefused.
    """

    def __init__(self, config: Config, *, deadline_s: float = 5.0) -> None:
        self._deadline_s = deadline_s
        self._client = Client(
            config.coordinator.advertise or config.coordinator.listen,
            hello=make_hello("client", name=f"client-{os.getpid()}"),
            transport=config.transport,
            heartbeat=None,
            client_keys=client_keys(config.transport.curve_dir),
        )

    def __enter__(self) -> Self:
        self._client.start(deadline_s=self._deadline_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close(deadline_s=1.0, reason="done")

    def status(self) -> StatusReply:
        """What everything is doing."""
        return self._ask(StatusRequest(), StatusReply)

    def control(self, request: ControlRequest) -> Ack:
        """Stop, pause or resume the run."""
        return self._ask(request, Ack)

    def _ask(self, body: AnyBody, reply: type[Reply]) -> Reply:
        answer = self._client.request(body, deadline_s=self._deadline_s).result(self._deadline_s + 1.0).envelope.body
        if isinstance(answer, Refused):
            raise PeerRefused(answer.reason, code=answer.code)
        if not isinstance(answer, reply):
            raise PeerRefused(f"the coordinator answered with {type(answer).__name__}", code="unexpected")
        return answer


def fetch_status(config: Config, *, deadline_s: float = 5.0) -> StatusReply:
    """One status of the run, over a connection of its own."""
    with OperatorClient(config, deadline_s=deadline_s) as client:
        return client.status()
