"""The process shell of a reward daemon: sockets, signals, loop. What it does is in `rewardd.service`."""

import logging
import os
import signal
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic

import numpy as np

from protocol.auth import check_advertised
from protocol.config.tree import Config
from protocol.endpoint import MetricsEndpoint
from protocol.errors import ExitStatus, UserError
from protocol.idle import IdleClock
from protocol.logs import event
from protocol.messages import AnyBody, Heartbeat, Hello, Refused, Trajectory, Welcome
from protocol.notify import notifier
from protocol.sockets import Client, Peer, Received, Server, make_hello
from protocol.versions import tokenizer_hash
from rewardd.greeting import heartbeat_ack, welcome
from rewardd.judge import CanaryFailed, Judge
from rewardd.service import RewardService

log = logging.getLogger(__name__)

CANARY_DEADLINE_S = 180.0
TURN_S = 0.25


class Daemon:
    """One run of the daemon; `run` is its loop."""

    def __init__(self, config: Config, *, name: str) -> None:
        self._config = config
        self._name = name
        self._stop_signals = 0
        self._clock = IdleClock()
        self._state = "starting"
        self._endpoint = MetricsEndpoint(
            config.rewardd.metrics_port, role="rewardd", name=name, setting="rewardd.metrics_port"
        )
        self._answers: deque[tuple[int, Future[Received]]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._judge = Judge(config.rewardd)
        self._service = RewardService(config.rewardd, name=name, judge=self._judge, outgoing=self)
        self._tokenizer_hash = _tokenizer_hash(config)
        self._server: Server | None = None
        self._client: Client | None = None

    # ------------------------------------------------------------ sockets, as the service sees them

    def answer(self, peer: Peer, body: AnyBody, *, reply_to: int) -> None:
        assert self._server is not None
        self._server.send(peer, body, reply_to=reply_to)

    def ask(self, token: int, body: AnyBody, *, arrays: Mapping[str, np.ndarray] | None) -> None:
        assert self._client is not None
        future = self._client.request(body, arrays=arrays, deadline_s=self._config.transport.ack_deadline_s)
        future.add_done_callback(lambda done: self._note(token, done))

    def _note(self, token: int, done: "Future[Received]") -> None:
        self._answers.append((token, done))
        os.eventfd_write(self._wake, 1)

    def _accept(self, hello: Hello) -> Welcome | Refused:
        assert self._client is not None and self._client.welcome is not None
        incarnation = self._client.hello.incarnation
        return welcome(hello, known=self._client.welcome, name=self._name, incarnation=incarnation)

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            state=self._state,
            waiting_for=self._waiting_for(),
            progress_age_s=monotonic() - self._service.last_progress,
            idle_fractions=self._clock.fractions(),
            metrics=dict(self._endpoint.values),
        )

    def _waiting_for(self) -> str:
        if self._client is not None and not self._client.connected:
            return "coordinator"
        return "" if self._service.num_held else "trajectories"

    # ------------------------------------------------------------ life

    def run(self) -> ExitStatus:
        """Prove the verifier, join the coordinator, serve until stopped."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            if not self._judge.prove("math", deadline_s=CANARY_DEADLINE_S, stopped=lambda: self._stop_signals > 0):
                return ExitStatus.STOPPED if self._stop_signals else ExitStatus.UNHEALTHY
            self._join()
            self._state = "serving"
            notifier().ready("serving")
            return self._serve()
        except CanaryFailed:
            return ExitStatus.UNHEALTHY
        finally:
            self._close()

    def _join(self) -> None:
        """Bind, then tell the coordinator the address."""
        transport = self._config.transport
        listen = self._config.rewardd.listen
        self._server = Server(
            listen,
            name=self._name,
            transport=transport,
            accept=self._accept,
            tokenizer_hash=self._tokenizer_hash,
            setting="rewardd.listen",
        )
        check_advertised(self._server.address, setting="rewardd.listen")
        coordinator = self._config.coordinator.advertise or self._config.coordinator.listen
        hello = make_hello(
            "rewardd",
            name=self._name,
            tokenizer_hash=self._tokenizer_hash,
            attributes={"address": self._server.address},
        )
        self._client = Client(coordinator, hello=hello, transport=transport, heartbeat=self._heartbeat)
        self._client.start(deadline_s=transport.connect_deadline_s)
        event(log, logging.INFO, "serving", address=self._server.address, coordinator=coordinator)

    def _serve(self) -> ExitStatus:
        assert self._server is not None and self._client is not None
        stop_by: float | None = None
        status = ExitStatus.STOPPED
        while True:
            ack = self._client.last_ack
            if stop_by is None and (self._stop_signals or (ack is not None and ack.command == "stop")):
                status = ExitStatus.STOPPED if self._stop_signals else ExitStatus.FINISHED
                stop_by = monotonic() + self._config.deploy.stop_grace_s / 2
                self._service.accepting, self._state = False, "stopping"
                notifier().stopping(status.name.lower())
            if stop_by is not None and (not self._service.num_held or monotonic() >= stop_by):
                event(log, logging.INFO, "stopped", unacknowledged=self._service.num_held, status=status.name)
                return status
            self._turn()

    def _turn(self) -> None:
        assert self._server is not None and self._client is not None
        idle = not self._service.num_held
        away = not self._client.connected
        self._clock.switch("waiting for trajectories" if idle else "waiting for coordinator" if away else "working")
        wait_s = min(TURN_S, self._service.wait_s())
        for received in self._server.poll(wait_s, extra=[self._wake, *self._judge.fds()]):
            if isinstance(received.body, Trajectory):
                self._service.on_trajectory(received)
            elif isinstance(received.body, Heartbeat):
                self._answer_heartbeat(received)
        self._server.gone()
        while self._answers:
            token, done = self._answers.popleft()
            error = done.exception()
            if error is None:
                self._service.on_answer(token, done.result().body)
            else:
                self._service.on_failure(token, error)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._service.turn(coordinator_up=self._client.connected)
        notifier().progress()
        self._endpoint.values = self._service.metrics() | self._server.stats.as_metrics("rewardd/wire")

    def _answer_heartbeat(self, received: Received) -> None:
        assert self._client is not None and self._client.welcome is not None
        ack = heartbeat_ack(self._client.last_ack or self._client.welcome)
        self.answer(received.peer, ack, reply_to=received.envelope.msg_id)

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop_signals += 1
        if self._stop_signals > 1:
            os._exit(ExitStatus.STOPPED)

    def _close(self) -> None:
        if self._client is not None:
            self._client.close(deadline_s=2.0, reason=self._state)
        if self._server is not None:
            self._server.close(deadline_s=2.0)
        self._judge.close()
        self._endpoint.close()
        os.close(self._wake)


def _tokenizer_hash(config: Config) -> str | None:
    """Hash of the tokenizer, if this machine has it (scoring itself needs none)."""
    try:
        return tokenizer_hash(config.model.tokenizer_path or config.model.path)
    except UserError as error:
        event(log, logging.INFO, "tokenizer not compared", reason=str(error))
        return None


def run(config: Config, *, name: str) -> ExitStatus:
    """Run a reward daemon until SIGTERM (STOPPED), the end of the run (FINISHED) or a failed canary (UNHEALTHY).

    Raises:
        UserError: the coordinator cannot be reached or refuses, an address cannot be used, a scorer is not installed.
    """
    return Daemon(config, name=name).run()
