"""A generator's work: lease prompts, sample answers, deliver them, follow new versions. No process matters here.

    granted -> sampling -> finished -> delivered (acknowledged by the coordinator through a reward daemon)
                  |------> cancelled, drained or failed -> handed back with its tokens

The service keeps up to `max_num_seqs` slots sampling and asks for more as they end. It never starts a lease above its
version, stops leasing when answers pile up undelivered, and says in its heartbeat what it waits for.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from time import monotonic

import numpy as np

from generators.backends.base import Backend, EngineFailed, RequestFailed
from generators.delivery import Delivery
from generators.environments.base import Environment
from generators.episodes import EpisodePlayer
from generators.slots import Slot, hand_back_of, slots_of, trajectory_of
from generators.text import Decoder
from protocol.config import Config
from protocol.errors import UserError
from protocol.idle import IdleClock
from protocol.logs import event
from protocol.messages import LeaseGrant, LeaseRequest, Refused, SlotProgress, SlotRef
from protocol.sockets import Client

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.25


class GeneratorService:
    """Runs leases on a backend. Used from one asyncio loop; `progress` and `metrics` are snapshots for other threads.

    Args:
        coordinator: the connected client of the coordinator.
        decoder: turns ids into text for scoring, and knows which ids exist.
        environment: speaks between the policy's turns; None: an answer is one turn.
    """

    def __init__(
        self,
        config: Config,
        *,
        name: str,
        backend: Backend,
        coordinator: Client,
        delivery: Delivery,
        decoder: Decoder,
        tokenizer_hash: str,
        environment: Environment | None = None,
    ) -> None:
        self._config = config
        self._name = name
        self._backend = backend
        self._coordinator = coordinator
        self._delivery = delivery
        self._decoder = decoder
        self._tokenizer_hash = tokenizer_hash
        self._player = EpisodePlayer(
            config.generators.environment, backend=backend, environment=environment, decoder=decoder
        )
        self._slots: dict[str, Slot] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()
        self._leasing = True
        self.failure: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()
        self.clock = IdleClock()
        self.waiting_for = "leases"
        self.progress: list[SlotProgress] = []
        self.num_finished = 0
        self.num_tokens = 0
        self.num_handed_back = 0
        self._last_seen: dict[str, int] = {}

    @property
    def num_running(self) -> int:
        return len(self._slots)

    @property
    def is_done(self) -> bool:
        """Nothing is sampled, delivered or handed back any more."""
        return not self._tasks

    # ------------------------------------------------------------ leases

    async def lease_forever(self) -> None:
        """Asks for leases as long as the generator takes work (cancel to end)."""
        while True:
            room = self._room()
            granted = 0
            if room > 0 and self._coordinator.connected:
                granted = await self._lease(room)
            elif room > 0:
                self.waiting_for = "coordinator"
            self._freed.clear()
            if not granted or self._room() <= 0:
                await self._wait_freed(_ASK_AGAIN_S)

    def _room(self) -> int:
        most = self._config.generators.max_num_seqs
        if not self._leasing or self._backend.policy_version < 0:
            return 0
        if self._delivery.num_undelivered >= 2 * most:
            self.waiting_for = "rewardd"
            return 0
        return most - len(self._slots)

    async def _wait_freed(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._freed.wait(), timeout_s)
        except TimeoutError:
            return

    async def _lease(self, room: int) -> int:
        request = LeaseRequest(max_slots=room, policy_version=self._backend.policy_version)
        future = self._coordinator.request(request, deadline_s=self._config.transport.request_deadline_s)
        try:
            received = await asyncio.wrap_future(future)
        except (UserError, TimeoutError) as error:
            event(log, logging.WARNING, "no lease", reason=str(error))
            self.waiting_for = "coordinator"
            return 0
        if isinstance(received.body, Refused):
            event(log, logging.WARNING, "lease refused", reason=received.body.reason)
            self.waiting_for = "coordinator"
            return 0
        assert isinstance(received.body, LeaseGrant)
        self.waiting_for = received.body.waiting_for
        return self._take(received.body, received.arrays)

    def _take(self, grant: LeaseGrant, arrays: Mapping[str, np.ndarray]) -> int:
        taken = 0
        for lease in grant.leases:
            for slot in slots_of(lease, arrays):
                newest = max([lease.min_version, *slot.answer.versions[-1:].tolist()])
                if not self._leasing or newest > self._backend.policy_version:
                    self._spawn(self._hand_back([slot], reason=f"version {newest} needed"))
                    continue
                taken += 1
                self._slots[slot.key] = slot
                self._spawn(self._work(slot))
        return taken

    # ------------------------------------------------------------ one slot

    async def _work(self, slot: Slot) -> None:
        try:
            await self._player.play(slot)
        except EngineFailed as error:
            if not self.failure.done():
                self.failure.set_result(error)
            return
        except RequestFailed as error:
            event(log, logging.WARNING, "request failed", slot=slot.key, reason=str(error))
            self._release(slot)
            await self._hand_back([slot], reason=str(error))
            return
        self._release(slot)
        if slot.answer.finish_reason == "aborted":
            await self._hand_back([slot], reason="cancelled" if slot.cancelled else "draining")
        else:
            await self._deliver(slot)

    def _release(self, slot: Slot) -> None:
        self._slots.pop(slot.key, None)
        self._freed.set()

    async def _deliver(self, slot: Slot) -> None:
        text = self._decoder.text(slot.answer.token_ids)
        body, arrays = trajectory_of(
            slot, generator=self._name, tokenizer_hash=self._tokenizer_hash, response_text=text
        )
        self.num_finished += 1
        ack = await self._delivery.deliver(body, arrays)
        if ack.status == "refused":
            event(log, logging.ERROR, "answer refused", slot=slot.key, reason=ack.reason)

    async def _hand_back(self, slots: list[Slot], *, reason: str) -> None:
        body, arrays = hand_back_of(slots, reason=reason)
        self.num_handed_back += len(slots)
        try:
            future = self._coordinator.request(
                body, arrays=arrays, deadline_s=self._config.transport.request_deadline_s
            )
            await asyncio.wrap_future(future)
        except (UserError, TimeoutError) as error:
            event(log, logging.WARNING, "slots not handed back: their lease will expire", reason=str(error))

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.critical("a slot's task failed", exc_info=error)
            if not self.failure.done():
                self.failure.set_result(EngineFailed(f"a slot's task failed: {error}"))

    # ------------------------------------------------------------ from outside

    async def cancel(self, refs: list[SlotRef]) -> None:
        """Ends slots that were moved elsewhere; their tokens are handed back for whoever continues them."""
        for ref in refs:
            slot = self._slots.get(f"{ref.group_id}/{ref.slot}/{ref.attempt}")
            if slot is not None and not slot.cancelled:
                slot.cancelled = True
                await self._player.interrupt(slot)

    def observe(self) -> Mapping[str, int]:
        """Refreshes the snapshots; returns tokens per running request."""
        counts = self._backend.progress()
        self.progress = [slot.progress(counts.get(slot.request_id, 0)) for slot in self._slots.values()]
        self.num_tokens += sum(max(0, count - self._last_seen.get(request, 0)) for request, count in counts.items())
        self._last_seen = dict(counts)
        self.clock.switch("working" if counts else f"waiting for {self.waiting_for or 'leases'}")
        return counts

    def stop_leasing(self) -> None:
        """No new work from now on."""
        self._leasing = False

    async def drain(self, *, finish_s: float, deliver_s: float) -> None:
        """Ends orderly: answers may finish for `finish_s`, the rest is handed back; then waits for acknowledgements."""
        self.stop_leasing()
        deadline = monotonic() + finish_s
        while self._slots and monotonic() < deadline and not self.failure.done():
            await self._wait_freed(min(_ASK_AGAIN_S, max(0.01, deadline - monotonic())))
            self._freed.clear()
        for slot in list(self._slots.values()):
            await self._player.interrupt(slot)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deliver_s)
        if self._tasks:
            event(log, logging.WARNING, "stopping with work not acknowledged", tasks=len(self._tasks))
        for task in list(self._tasks):
            task.cancel()
