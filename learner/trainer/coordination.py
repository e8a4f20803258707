"""The trainer's side of the conversation with the coordinator. Outlives restarts of the coordinator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from learner.trainer.batch import TrajectoryArrays
from learner.trainer.stop import StopSignal
from protocol.config import Config
from protocol.errors import ExitStatus, PeerRefused, PeerUnreachable, UserError
from protocol.logs import event
from protocol.messages import (
    Ack,
    AnyBody,
    BatchNotReady,
    BatchPlan,
    BatchRequest,
    Heartbeat,
    Refused,
    ResumePlan,
    ResumeRequest,
    Shard,
    ShardRequest,
    Welcome,
)
from protocol.notify import notifier
from protocol.sockets import Client, Received, make_hello

log = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_S = 1.0


class Interrupted(Exception):
    """The stop signal arrived while waiting for the coordinator."""


class Coordination:
    """One rank's connection.

    Args:
        heartbeat: builds the heartbeat; None for ranks other than 0.
        stop: ends every wait, with `Interrupted`.
        attributes: go into the hello (rank 0: the publisher's address).
    """

    def __init__(
        self,
        config: Config,
        *,
        name: str,
        stop: StopSignal,
        tokenizer_hash: str,
        heartbeat: Callable[[], Heartbeat] | None = None,
        attributes: dict[str, str | int | float | bool | list[str]] | None = None,
    ) -> None:
        self._config = config
        self._stop = stop
        self.stop_commanded = False
        self._closing = False
        self._lock = threading.Lock()
        self._unsent: list[AnyBody] = []
        self._client = Client(
            config.coordinator.advertise or config.coordinator.listen,
            hello=make_hello("trainer", name=name, tokenizer_hash=tokenizer_hash, attributes=attributes or {}),
            transport=config.transport,
            heartbeat=heartbeat,
            on_message=self._on_message,
            on_welcome=self._on_welcome,
        )

    def start(self) -> Welcome:
        """Raises PeerUnreachable after ``transport.connect_deadline_s``, or PeerRefused."""
        return self._client.start(deadline_s=self._config.transport.connect_deadline_s)

    @property
    def connected(self) -> bool:
        return self._client.connected

    def resume(self, *, last_batch_id: int, policy_version: int, num_ranks: int) -> ResumePlan:
        """Raises UserError when the coordinator's ledger and this checkpoint do not belong together."""
        body = ResumeRequest(last_batch_id=last_batch_id, policy_version=policy_version, num_ranks=num_ranks)
        return self._ask(body, expect=ResumePlan)[0]

    def next_batch(self, *, after_batch_id: int, policy_version: int) -> BatchPlan | BatchNotReady:
        """The next plan, or why there is none yet, after at most about ``trainer.batch_wait_s``.

        With the coordinator gone: BatchNotReady("coordinator").
        """
        wait_s = self._config.trainer.batch_wait_s
        body = BatchRequest(after_batch_id=after_batch_id, policy_version=policy_version, wait_s=wait_s)
        future = self._client.request(body, deadline_s=wait_s + self._config.transport.request_deadline_s)
        try:
            received = self._wait(future)
        except (PeerUnreachable, TimeoutError) as error:
            self._stop.wait(RETRY_S)
            return BatchNotReady(waiting_for="coordinator", detail=str(error))
        answer = received.envelope.body
        if isinstance(answer, BatchPlan | BatchNotReady):
            return answer
        raise _refused(body, answer)

    def shard(self, *, batch_id: int, rank: int, num_ranks: int) -> dict[int, TrajectoryArrays]:
        """This rank's trajectories by item index. Waits out restarts of the coordinator."""
        shard, arrays = self._ask(ShardRequest(batch_id=batch_id, rank=rank, num_ranks=num_ranks), expect=Shard)
        return {index: _trajectory(arrays, index) for index in shard.indices}

    def report(self, body: AnyBody) -> None:
        """Delivers a message that the run cannot go on without. Waits out restarts of the coordinator."""
        self._ask(body, expect=Ack)

    def tell(self, body: AnyBody) -> None:
        """Delivers in the background, again after failures; never blocks. Thread-safe."""
        if self._closing:
            return
        future = self._client.request(body, deadline_s=self._config.transport.request_deadline_s)

        def done(answer: Future[Received]) -> None:
            error = answer.exception()
            if error is None:
                return
            if isinstance(error, PeerUnreachable | TimeoutError):
                with self._lock:
                    self._unsent.append(body)
            else:
                event(log, logging.ERROR, "message refused", kind=type(body).__name__, error=str(error))

        future.add_done_callback(done)

    def tend(self) -> None:
        """Tells again what could not be delivered."""
        with self._lock:
            unsent, self._unsent = self._unsent, []
        for body in unsent:
            self.tell(body)

    def close(self, *, deadline_s: float, reason: str) -> None:
        self.tend()
        self._closing = True
        unanswered = self._client.close(deadline_s=deadline_s, reason=reason)
        if unanswered or self._unsent:
            event(log, logging.WARNING, "messages left undelivered", num=unanswered + len(self._unsent))

    def _ask(self, body: AnyBody, *, expect: type[T]) -> tuple[T, Mapping[str, np.ndarray]]:
        while True:
            future = self._client.request(body, deadline_s=self._config.transport.request_deadline_s)
            try:
                received = self._wait(future)
            except (PeerUnreachable, TimeoutError) as error:
                event(log, logging.WARNING, "waiting for the coordinator", wanted=type(body).__name__, error=str(error))
                self._stop.wait(RETRY_S)
                continue
            answer = received.envelope.body
            if not isinstance(answer, expect):
                raise _refused(body, answer)
            return answer, received.arrays

    def _wait(self, future: Future[Received]) -> Received:
        """The answer. Raises Interrupted soon after the stop signal, or what the request failed with."""
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        while not done.wait(0.1):
            notifier().progress()
            if self._stop.requested:
                raise Interrupted
        return future.result()

    def _on_message(self, received: Received) -> None:
        body = received.envelope.body
        if getattr(body, "command", "") == "stop":
            self.stop_commanded = True

    def _on_welcome(self, welcome: Welcome) -> None:
        event(log, logging.INFO, "connected to the coordinator", incarnation=welcome.incarnation)
        self.tend()


def _refused(body: AnyBody, answer: AnyBody) -> UserError:
    reason = answer.reason if isinstance(answer, Refused) else f"unexpected answer {type(answer).__name__}"
    if isinstance(answer, Refused):
        return PeerRefused(f"the coordinator refused {type(body).__name__}: {reason}", code=answer.code)
    return UserError(f"{type(body).__name__}: {reason}", status=ExitStatus.FAILED)


def _trajectory(arrays: Mapping[str, np.ndarray], index: int) -> TrajectoryArrays:
    names = ("token_ids", "logp_behaviour", "versions", "loss_mask")
    return TrajectoryArrays(**{name: arrays[f"{index}/{name}"] for name in names})
