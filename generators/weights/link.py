"""A generator's membership in the weight group: between the publisher's control socket and the engine's workers.

    WeightJoin  ->  publisher                     on every (new) publisher, and after being fenced
    WeightGroup, WeightOffer -> workers           relayed as they come
    joined, staged, failed   <- workers           merged by `StageHub`, relayed to the publisher
    staged: the backend pauses, loads, resumes -> committed

The publisher may die, restart elsewhere or fence this generator at any moment; the old version serves on meanwhile.
Messages from a publisher that is no longer the current one are dropped.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from generators.backends.base import Backend, EngineFailed
from generators.weights.hub import StageHub
from generators.weights.link_messages import TRIAL_EPOCH
from protocol.config import Config
from protocol.errors import UserError
from protocol.logs import event
from protocol.messages import (
    Heartbeat,
    Hello,
    Refused,
    WeightGroup,
    WeightJoin,
    WeightOffer,
    WeightStatus,
)
from protocol.sockets import Client, Received
from protocol.threads import in_thread

log = logging.getLogger(__name__)


class WeightLink:
    """Keeps the backend's version that of the publisher's newest offer.

    Args:
        hello: of this generator; the publisher gets the same one as the coordinator.
        on_engine_failed: called when a load left the engine unusable.
    """

    def __init__(
        self,
        config: Config,
        *,
        hello: Hello,
        backend: Backend,
        on_engine_failed: Callable[[EngineFailed], None],
    ) -> None:
        self._config = config
        self._hello = hello
        self._backend = backend
        self._on_engine_failed = on_engine_failed
        self._loop = asyncio.get_running_loop()
        self._client: Client | None = None
        self._address: str | None = None
        self._offered_at: dict[int, float] = {}
        self._loads: asyncio.Queue[WeightStatus] = asyncio.Queue()
        self._relays: asyncio.Queue[WeightGroup | WeightOffer] = asyncio.Queue()
        self._relayed_epoch = TRIAL_EPOCH - 1
        self._not_loading = asyncio.Event()
        self._not_loading.set()
        self._trial: asyncio.Future[None] | None = None
        self.num_updates = 0
        self.last_pause_s = 0.0
        self.last_update_s = 0.0
        self.hub = StageHub(num_workers=backend.worker_info.num_workers, on_status=self._on_worker_status)
        self._tasks = [
            asyncio.create_task(self._relay(), name="weight-relay"),
            asyncio.create_task(self._load_staged(), name="weight-loader"),
        ]

    async def follow(self, address: str | None) -> None:
        """Connects to the publisher at `address` (told by the coordinator); another address replaces the old one."""
        if address == self._address or address is None:
            return
        await self._disconnect("another publisher")
        self._address = address
        client = Client(
            address,
            hello=self._hello,
            transport=self._config.transport,
            heartbeat=lambda: Heartbeat(state="up", policy_version=self._backend.policy_version),
            on_message=lambda received: self._call(self._on_message, client, received),
            on_welcome=lambda _: self._call(self._join, client),
        )
        self._client = client
        deadline_s = self._config.transport.connect_deadline_s
        try:
            await asyncio.wrap_future(in_thread("weights-connect", lambda: client.start(deadline_s=deadline_s)))
        except UserError as error:
            event(log, logging.WARNING, "no weight publisher", address=address, reason=str(error))
            if self._client is client:
                self._client, self._address = None, None

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _join(self, client: Client) -> None:
        if client is not self._client:
            return
        info = self._backend.worker_info
        join = WeightJoin(
            num_workers=info.num_workers,
            transports=info.transports,
            policy_version=self._backend.policy_version,
            node=client.hello.host,
            device_uuids=[ready.device_uuid for ready in self.hub.workers.values() if ready.device_uuid],
        )
        future = client.request(join, deadline_s=self._config.transport.request_deadline_s)
        future.add_done_callback(lambda done: self._call(self._joined, client, done.exception() or done.result().body))

    def _joined(self, client: Client, answer: object) -> None:
        if isinstance(answer, Refused):
            event(log, logging.ERROR, "the weight publisher refuses this generator", reason=answer.reason)
        elif isinstance(answer, Exception) and client is self._client and client.connected:
            event(log, logging.WARNING, "joining the weight group failed; trying again", reason=str(answer))
            self._join(client)

    def _on_message(self, client: Client, received: Received) -> None:
        body = received.body
        if client is not self._client:
            return
        if isinstance(body, Refused) and body.code == "fenced":
            event(log, logging.WARNING, "fenced by the weight publisher", reason=body.reason)
            self._join(client)
        elif isinstance(body, WeightGroup | WeightOffer):
            if isinstance(body, WeightOffer):
                self._offered_at[body.policy_version] = time.monotonic()
            self._relays.put_nowait(body)

    async def _relay(self) -> None:
        """Passes commands on in order; none while a load reads the stage."""
        while True:
            body = await self._relays.get()
            await self._not_loading.wait()
            self._relayed_epoch = body.epoch
            await self.hub.send(body)

    def _on_worker_status(self, status: WeightStatus) -> None:
        if status.epoch != self._relayed_epoch:
            return
        if status.phase == "staged":
            self._not_loading.clear()
            self._loads.put_nowait(status)
        if status.epoch != TRIAL_EPOCH:
            self._report(status)
        elif status.phase == "failed":
            self._end_trial(EngineFailed(f"the trial weight update failed: {status.reason}"))

    def _end_trial(self, error: EngineFailed | None) -> None:
        if self._trial is None or self._trial.done():
            return
        if error is None:
            self._trial.set_result(None)
        else:
            self._trial.set_exception(error)

    def _report(self, status: WeightStatus) -> None:
        if self._client is None:
            return
        try:
            self._client.send(status)
        except UserError as error:
            event(log, logging.WARNING, "weight status not sent", reason=str(error))

    async def _load_staged(self) -> None:
        while True:
            status = await self._loads.get()
            try:
                pause_s = await self._backend.load_version(status.policy_version)
            except EngineFailed as error:
                self._report(msgspec.structs.replace(status, phase="failed", reason=str(error)))
                self._end_trial(error)
                self._on_engine_failed(error)
                return
            finally:
                self._not_loading.set()
            if status.epoch == TRIAL_EPOCH:
                self._end_trial(None)
                continue
            self._committed(status, pause_s)

    def _committed(self, status: WeightStatus, pause_s: float) -> None:
        self.num_updates += 1
        self.last_pause_s = pause_s
        self.last_update_s = time.monotonic() - self._offered_at.pop(status.policy_version, time.monotonic())
        fields = {"policy_version": status.policy_version, "pause_s": round(pause_s, 3)}
        event(log, logging.INFO, "version in use", seconds=round(self.last_update_s, 3), **fields)
        self._report(
            msgspec.structs.replace(status, phase="committed", seconds=self.last_update_s, pause_seconds=pause_s)
        )

    async def try_update(self, offer: WeightOffer) -> None:
        """A real update from the model's own folder before any lease: stage, check, pause, load, resume.

        Raises:
            EngineFailed: naming what does not work here.
        """
        self._trial = self._loop.create_future()
        self._relays.put_nowait(offer)
        try:
            await asyncio.wait_for(self._trial, offer.deadline_s)
        except TimeoutError:
            raise EngineFailed(f"the trial weight update took longer than {offer.deadline_s:g} s") from None
        finally:
            self._trial = None

    async def _disconnect(self, reason: str) -> None:
        client, self._client = self._client, None
        if client is not None:
            await asyncio.wrap_future(in_thread("weights-close", lambda: client.close(deadline_s=0.5, reason=reason)))

    async def close(self) -> None:
        """Leaves the group."""
        for task in self._tasks:
            task.cancel()
        await self._disconnect("stopping")
        await self.hub.close()
