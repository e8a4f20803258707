"""Brings finished answers to the reward daemons, until the coordinator's acknowledgement comes back through one."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from protocol.config.services import TransportSection
from protocol.errors import UserError
from protocol.logs import event
from protocol.messages import Busy, Heartbeat, Hello, RewarddAddress, Trajectory, TrajectoryAck
from protocol.sockets import Client
from protocol.threads import in_thread

log = logging.getLogger(__name__)

_WAIT_S = 0.2


@dataclass(eq=False)
class _Daemon:
    """One reward daemon; not asked before `not_before` (monotonic), when it was busy or failed."""

    address: str
    client: Client
    up: bool = False
    not_before: float = 0.0


class Delivery:
    """Round robin over the live daemons; an answer is sent again, elsewhere, until it is acknowledged.

    The coordinator counts duplicates once, so sending again is always safe.
    """

    def __init__(self, *, hello: Hello, transport: TransportSection) -> None:
        self._hello = hello
        self._transport = transport
        self._daemons: dict[str, _Daemon] = {}
        self._turn = 0
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self.num_undelivered = 0
        self.num_resent = 0

    def follow(self, addresses: Sequence[RewarddAddress]) -> None:
        """Takes the coordinator's list of live daemons: connects to new ones, drops those that are gone."""
        wanted = {address.name: address.address for address in addresses}
        for name, daemon in list(self._daemons.items()):
            if wanted.get(name) != daemon.address:
                del self._daemons[name]
                self._spawn(self._close_daemon(daemon))
        for name, address in wanted.items():
            if name not in self._daemons:
                client = Client(
                    address, hello=self._hello, transport=self._transport, heartbeat=lambda: Heartbeat(state="up")
                )
                self._daemons[name] = _Daemon(address=address, client=client)
                self._spawn(self._connect(name, self._daemons[name]))

    async def deliver(self, body: Trajectory, arrays: Mapping[str, np.ndarray]) -> TrajectoryAck:
        """Returns the coordinator's final word on this answer; tries as long as it takes (cancel to give up)."""
        self.num_undelivered += 1
        attempts = 0
        try:
            while True:
                daemon = self._pick()
                if daemon is None:
                    self._changed.clear()
                    await _wait(self._changed, _WAIT_S)
                    continue
                self.num_resent += attempts > 0
                attempts += 1
                ack = await self._ask(daemon, body, arrays)
                if ack is not None:
                    return ack
        finally:
            self.num_undelivered -= 1

    async def _ask(self, daemon: _Daemon, body: Trajectory, arrays: Mapping[str, np.ndarray]) -> TrajectoryAck | None:
        try:
            future = daemon.client.request(body, arrays=arrays, deadline_s=self._transport.ack_deadline_s)
            answer = (await asyncio.wrap_future(future)).body
        except (UserError, TimeoutError) as error:
            daemon.not_before = monotonic() + self._transport.heartbeat_s
            event(log, logging.WARNING, "answer not acknowledged", rewardd=daemon.address, reason=str(error))
            return None
        if isinstance(answer, TrajectoryAck):
            return answer
        daemon.not_before = monotonic() + (answer.retry_after_s if isinstance(answer, Busy) else 1.0)
        return None

    def _pick(self) -> _Daemon | None:
        now = monotonic()
        ready = [d for d in self._daemons.values() if d.up and d.client.connected and d.not_before <= now]
        self._turn += 1
        return ready[self._turn % len(ready)] if ready else None

    async def _connect(self, name: str, daemon: _Daemon) -> None:
        deadline_s = self._transport.connect_deadline_s
        try:
            await asyncio.wrap_future(in_thread("rewardd-connect", lambda: daemon.client.start(deadline_s=deadline_s)))
            daemon.up = True
            self._changed.set()
        except UserError as error:
            event(log, logging.WARNING, "reward daemon not reached", rewardd=name, reason=str(error))
            if self._daemons.get(name) is daemon:
                del self._daemons[name]

    async def _close_daemon(self, daemon: _Daemon) -> None:
        await asyncio.wrap_future(in_thread("rewardd-close", lambda: daemon.client.close(deadline_s=0.2)))

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Closes all connections."""
        daemons, self._daemons = list(self._daemons.values()), {}
        await asyncio.gather(*(self._close_daemon(daemon) for daemon in daemons), return_exceptions=True)
        for task in list(self._background):
            task.cancel()


async def _wait(changed: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(changed.wait(), timeout_s)
    except TimeoutError:
        return
