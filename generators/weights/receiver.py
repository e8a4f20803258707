"""Receives whole versions in the background of an engine's worker process, while requests run.

Protocol of one worker (the main process relays between it and the publisher):

    WeightGroup  -> a new session: a thread that joins the epoch's group         -> joined | failed
    WeightOffer  -> the session receives all buckets into the stage, checks them -> staged | failed
    (main pauses the engine; the engine's transfer engine takes the stage and loads it)

A new WeightGroup ends the session before it, whatever it is doing: its communicator is aborted, what it reports
afterwards carries its old epoch and is ignored. Nothing here touches the weights in use.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
import zmq

from generators.weights.coverage import check_coverage
from generators.weights.link_messages import Report, WorkerReady, WorkerStatus, command_decoder, report_encoder
from generators.weights.stage import Stage
from learner.weights.group import TRANSPORT_REASON
from learner.weights.snapshot import side_stream
from learner.weights.transports import Communicator, TransportFailed, connect
from protocol.messages import WeightGroup, WeightOffer, WeightStatus

log = logging.getLogger(__name__)

_POLL_MS = 200


class Receiver:
    """The weight receiver of one engine worker."""

    def __init__(
        self,
        address: str,
        *,
        worker: int,
        device: torch.device,
        expected: dict[str, tuple[str, tuple[int, ...]]],
        tied: bool,
    ) -> None:
        self.worker = worker
        self.device = device
        self._address = address
        self._expected = expected
        self._tied = tied
        self._stage = Stage(device=device)
        self._staged_version: int | None = None
        self._session: _Session | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._reports: SimpleQueue[Report] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weight-receiver", daemon=True)

    def start(self) -> None:
        """Connects to the main process and waits for commands."""
        self._reports.put(
            WorkerReady(
                worker=self.worker, pid=os.getpid(), device=str(self.device), device_uuid=_device_uuid(self.device)
            )
        )
        self._thread.start()

    def staged(self, policy_version: int) -> list[tuple[str, torch.Tensor]]:
        """Tensors of a staged version, proved whole.

        Raises:
            ValueError: that version is not what is staged.
        """
        with self._lock:
            if self._staged_version != policy_version:
                raise ValueError(f"version {policy_version} is not staged (staged: {self._staged_version})")
            return self._stage.tensors()

    def close(self) -> None:
        """Ends the threads; a blocked collective is aborted."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        if self._session is not None:
            self._session.cancel()
            self._session.join(timeout_s=2.0)

    def report(self, status: WeightStatus) -> None:
        """Queues a report to the main process (thread-safe)."""
        self._reports.put(WorkerStatus(worker=self.worker, status=status))

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, f"worker/{self.worker}".encode())
        socket.connect(self._address)
        try:
            while not self._stopping.is_set():
                while (report := _next(self._reports)) is not None:
                    socket.send(report_encoder.encode(report))
                if socket.poll(_POLL_MS if self._session is None else _POLL_MS // 10):
                    self._handle(command_decoder.decode(socket.recv()).body)
        finally:
            socket.close()
            context.term()

    def _handle(self, body: WeightGroup | WeightOffer) -> None:
        if isinstance(body, WeightGroup):
            if self._session is not None:
                self._session.cancel()
            self._session = _Session(self, body)
        elif self._session is not None and self._session.epoch == body.epoch:
            self._session.offers.put(body)
        elif body.path:
            if self._session is not None:
                self._session.cancel()
            self._session = _Session(self, None, epoch=body.epoch)
            self._session.offers.put(body)
        else:
            reason = "this worker is not in that epoch's weight group"
            self.report(
                WeightStatus(epoch=body.epoch, policy_version=body.policy_version, phase="failed", reason=reason)
            )

    def receive(self, offer: WeightOffer, communicator: Communicator | None, *, cancelled: threading.Event) -> None:
        """Fills and proves the stage (runs in a session's thread).

        Raises:
            ValueError: what came is not what was offered, or not this model. TransportFailed: it did not come.
        """
        deadline = time.monotonic() + offer.deadline_s
        check_coverage(offer.tensors, self._expected, tied=self._tied)
        with self._lock:
            self._staged_version = None
        receive_on = communicator.device if communicator is not None else torch.device("cpu")
        self._stage.prepare(offer, receive_on=receive_on)
        if communicator is None:
            self._stage.read_files(Path(offer.path))
        else:
            for bucket in range(self._stage.num_buckets):
                communicator.broadcast(self._stage.buffer(bucket), deadline=deadline)
                self._stage.received(bucket)
        self._stage.verify()
        with self._lock:
            if cancelled.is_set():
                raise TransportFailed("a newer weight group replaced this one")
            self._staged_version = offer.policy_version


class _Session:
    """Membership in one epoch: a thread that joins, then serves offers until cancelled or failed."""

    def __init__(self, receiver: Receiver, group: WeightGroup | None, *, epoch: int | None = None) -> None:
        self.epoch = group.epoch if group is not None else epoch
        self.offers: SimpleQueue[WeightOffer] = SimpleQueue()
        self._receiver = receiver
        self._group = group
        self._cancelled = threading.Event()
        self._communicator: Communicator | None = None
        self._thread = threading.Thread(target=self._run, name=f"weight-epoch-{self.epoch}", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        self._cancelled.set()
        if self._communicator is not None:
            self._communicator.abort()

    def join(self, *, timeout_s: float) -> None:
        """Waits for the thread of a cancelled session."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with _own_stream(self._receiver.device):
            self._serve()

    def _serve(self) -> None:
        version = -1
        try:
            if self._group is not None:
                self._join(self._group)
            while not self._cancelled.is_set():
                try:
                    offer = self.offers.get(timeout=0.5)
                except Empty:
                    continue
                version = offer.policy_version
                started = time.monotonic()
                self._receiver.receive(offer, self._communicator, cancelled=self._cancelled)
                self._report("staged", version, seconds=time.monotonic() - started)
        except (TransportFailed, ValueError, RuntimeError, OSError) as error:
            if not self._cancelled.is_set():
                log.warning("weight receiver: epoch %s, version %s failed: %s", self.epoch, version, error)
                broken = TRANSPORT_REASON if isinstance(error, TransportFailed) else ""
                self._report("failed", version, reason=f"{broken}{error}")
        finally:
            if self._communicator is not None:
                self._communicator.abort()

    def _join(self, group: WeightGroup) -> None:
        self._communicator = connect(
            group.transport,
            store_host=group.store_host,
            store_port=group.store_port,
            rank=group.first_rank,
            world_size=group.world_size,
            deadline_s=group.deadline_s,
            device=self._receiver.device,
        )
        self._report("joined", -1)

    def _report(self, phase: str, version: int, *, reason: str = "", seconds: float = 0.0) -> None:
        assert self.epoch is not None
        status = WeightStatus(
            epoch=self.epoch,
            policy_version=version,
            phase=phase,  # type: ignore[arg-type]
            reason=reason,
            seconds=seconds,
        )
        self._receiver.report(status)


def _next(reports: "SimpleQueue[Report]") -> Report | None:
    try:
        return reports.get_nowait()
    except Empty:
        return None


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU: this thread works on the engine's device, on a stream beside the engine's."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(side_stream(device)):
        yield


def _device_uuid(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)
