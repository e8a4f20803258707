"""The main process's end of the sockets to the weight receivers in the engine's workers."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from generators.weights.link_messages import Command, WorkerReady, WorkerStatus, command_encoder, report_decoder
from protocol.messages import WeightGroup, WeightOffer, WeightStatus


class StageHub:
    """Sends commands to all workers and merges their reports: one worker's failure is everyone's failure.

    Args:
        on_status: gets "joined" or "staged" once all workers reported it, "failed" at the first failure.
    """

    def __init__(self, *, num_workers: int, on_status: Callable[[WeightStatus], None]) -> None:
        self.num_workers = num_workers
        self.workers: dict[int, WorkerReady] = {}
        self._folder = tempfile.mkdtemp(prefix="slipstream-")
        self.address = f"ipc://{self._folder}/stage"
        self._on_status = on_status
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.address)
        self._ready = asyncio.Event()
        self._reached: dict[tuple[int, int, str], set[int]] = {}
        self._failed: set[tuple[int, int]] = set()
        self._task = asyncio.create_task(self._listen(), name="stage-hub")

    async def wait_ready(self, deadline_s: float) -> None:
        """Waits for every worker's receiver.

        Raises:
            TimeoutError: not all are there.
        """
        await asyncio.wait_for(self._ready.wait(), deadline_s)

    async def send(self, body: WeightGroup | WeightOffer) -> None:
        """Passes a command on to all workers, each with its own rank."""
        for worker in sorted(self.workers):
            if isinstance(body, WeightGroup):
                mine: WeightGroup | WeightOffer = msgspec.structs.replace(body, first_rank=body.first_rank + worker)
            else:
                mine = body
            await self._socket.send_multipart([f"worker/{worker}".encode(), command_encoder.encode(Command(mine))])

    async def _listen(self) -> None:
        while True:
            _, frame = await self._socket.recv_multipart()
            report = report_decoder.decode(frame)
            if isinstance(report, WorkerReady):
                self.workers[report.worker] = report
                if len(self.workers) == self.num_workers:
                    self._ready.set()
            else:
                self._merge(report)

    def _merge(self, report: WorkerStatus) -> None:
        status = report.status
        update = (status.epoch, status.policy_version)
        if status.phase == "failed":
            if update not in self._failed:
                self._failed.add(update)
                self._on_status(status)
            return
        reached = self._reached.setdefault((*update, status.phase), set())
        reached.add(report.worker)
        if len(reached) == self.num_workers:
            self._forget_before(status.epoch)
            self._on_status(status)

    def _forget_before(self, epoch: int) -> None:
        self._reached = {key: workers for key, workers in self._reached.items() if key[0] >= epoch}
        self._failed = {key for key in self._failed if key[0] >= epoch}

    async def close(self) -> None:
        """Closes the socket and removes its folder."""
        self._task.cancel()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
