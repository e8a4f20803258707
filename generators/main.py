"""The process shell of a generator: start-up, signals, watchdog, exit status. The work is `generators.service`."""

import asyncio
import logging
import os
import signal
from time import monotonic
from typing import Any

import psutil

from generators.backends import Backend, make_backend
from generators.backends.base import EngineFailed
from generators.delivery import Delivery
from generators.environments import load_environment
from generators.service import GeneratorService
from generators.text import Decoder
from generators.watchdog import Watchdog
from generators.weights.joining import Joining
from protocol.config import Config
from protocol.endpoint import MetricsEndpoint
from protocol.errors import ExitStatus
from protocol.logs import event
from protocol.messages import Heartbeat, HeartbeatAck, Welcome
from protocol.notify import notifier
from protocol.sockets import Client, Received, make_hello, new_incarnation
from protocol.threads import in_thread
from protocol.versions import tokenizer_hash

log = logging.getLogger(__name__)

_TICK_S = 0.25
_CLOSE_S = 15.0
_ORDERLY = (ExitStatus.STOPPED, ExitStatus.FINISHED, ExitStatus.MEMORY_LIMIT)


class Generator:
    """One run of a generator; `run` is its life.

    Args:
        signals: take SIGTERM and SIGINT (only a process's main thread can).
    """

    def __init__(self, config: Config, *, name: str, signals: bool = True) -> None:
        self._signals = (signal.SIGTERM, signal.SIGINT) if signals else ()
        self._config = config
        self._name = name
        self._hash = tokenizer_hash(config.model.tokenizer_path or config.model.path)
        self._backend: Backend = make_backend(config, name=name)
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[ExitStatus] = self._loop.create_future()
        self._state = "starting"
        self._service: GeneratorService | None = None
        self._endpoint = MetricsEndpoint(
            config.generators.metrics_port, role="generator", name=name, setting="generators.metrics_port"
        )
        self._watchdog = Watchdog(config.generators.no_token_s, now=monotonic())
        self._acks: asyncio.Queue[HeartbeatAck | Welcome] = asyncio.Queue()
        info = self._backend.worker_info
        hello = make_hello(
            "generator",
            name=name,
            incarnation=new_incarnation(),
            tokenizer_hash=self._hash,
            attributes={
                "num_workers": info.num_workers,
                "transports": info.transports,
                "device": info.device,
                "max_num_seqs": config.generators.max_num_seqs,
            },
        )
        self._client = Client(
            config.coordinator.advertise or config.coordinator.listen,
            hello=hello,
            transport=config.transport,
            heartbeat=self._heartbeat,
            on_message=self._on_message,
            on_welcome=lambda welcome: self._post(self._acks.put_nowait, welcome),
            on_refused=lambda error: self._post(self._end, ExitStatus.LOST_DEPENDENCY, str(error)),
        )
        environment = config.generators.environment
        self._environment = load_environment(environment.name, dict(environment.options)) if environment.name else None
        self._delivery = Delivery(hello=hello, transport=config.transport)
        self._weights = Joining(config, hello=hello, backend=self._backend)

    async def run(self) -> ExitStatus:
        """Start the engine, prove a weight update, serve until told to end or something breaks."""
        for number in self._signals:
            self._loop.add_signal_handler(number, self._on_signal)
        try:
            starting = asyncio.ensure_future(self._start())
            await _first_of(starting, self._ending)
            if not starting.done():
                starting.cancel()
                return self._ending.result()
            self._service = starting.result()
            return await self._serve(self._service)
        except EngineFailed as error:
            event(log, logging.CRITICAL, "engine failed", reason=str(error))
            return ExitStatus.ENGINE_FAILED
        finally:
            await self._close()

    async def _start(self) -> GeneratorService:
        deadline_s = self._config.transport.connect_deadline_s
        await asyncio.wrap_future(in_thread("connect", lambda: self._client.start(deadline_s=deadline_s)))
        await self._weights.start_engine()
        return GeneratorService(
            self._config,
            name=self._name,
            backend=self._backend,
            coordinator=self._client,
            delivery=self._delivery,
            decoder=Decoder(self._config.model.tokenizer_path or self._config.model.path),
            tokenizer_hash=self._hash,
            environment=self._environment,
        )

    async def _serve(self, service: GeneratorService) -> ExitStatus:
        self._state = "serving"
        notifier().ready(f"serving policy version {self._backend.policy_version}")
        event(log, logging.INFO, "serving", policy_version=self._backend.policy_version)
        leasing = asyncio.ensure_future(service.lease_forever())
        tasks = [leasing, asyncio.ensure_future(self._follow_acks(service)), asyncio.ensure_future(self._tick(service))]
        try:
            await _first_of(self._ending, service.failure, self._weights.failure, *tasks)
            for failure in (service.failure, self._weights.failure):
                if failure.done():
                    raise failure.result()
            for task in tasks:
                if task.done():
                    task.result()
            status = self._ending.result()
            if status in _ORDERLY:
                leasing.cancel()
                await self._drain(service, status)
            return status
        finally:
            for task in tasks:
                task.cancel()

    async def _drain(self, service: GeneratorService, status: ExitStatus) -> None:
        self._state = "draining"
        notifier().stopping("draining")
        grace_s = self._config.deploy.stop_grace_s
        finish_s = 0.0 if status is ExitStatus.FINISHED else min(self._config.generators.drain_s, grace_s / 2)
        await service.drain(finish_s=finish_s, deliver_s=grace_s / 4)
        event(log, logging.INFO, "drained", finished=service.num_finished, handed_back=service.num_handed_back)

    async def _follow_acks(self, service: GeneratorService) -> None:
        while True:
            ack = await self._acks.get()
            self._delivery.follow(ack.rewardd)
            await self._weights.follow(ack.weights_address, published_version=ack.published_version)
            if isinstance(ack, Welcome):
                continue
            await service.cancel(ack.cancel)
            if ack.command == "stop":
                self._end(ExitStatus.FINISHED, "the coordinator says stop")
            elif ack.command == "drain":
                self._end(ExitStatus.STOPPED, "the coordinator says drain")

    async def _tick(self, service: GeneratorService) -> None:
        while True:
            problem = self._watchdog.observe(service.observe(), now=monotonic())
            if problem:
                self._end(ExitStatus.UNHEALTHY, problem)
            await self._backend.check_health()
            self._endpoint.values = self._metrics(service)
            notifier().progress()
            limit_gb = self._config.generators.memory_limit_gb
            if limit_gb and (used_gb := self._resident_gb()) > limit_gb:
                self._end(ExitStatus.MEMORY_LIMIT, f"{used_gb:.1f} GB resident (generators.memory_limit_gb)")
            await asyncio.sleep(_TICK_S)

    def _resident_gb(self) -> float:
        total = 0
        for pid in (os.getpid(), *self._backend.child_pids()):
            try:
                total += psutil.Process(pid).memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total / 1e9

    # ------------------------------------------------------------ from other threads and signals

    def _post(self, function: object, *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]

    def _on_message(self, received: Received) -> None:
        if isinstance(received.body, HeartbeatAck):
            self._post(self._acks.put_nowait, received.body)

    def _heartbeat(self) -> Heartbeat:
        service = self._service
        if service is None:
            return Heartbeat(state=self._state, waiting_for="engine", policy_version=self._backend.policy_version)
        return Heartbeat(
            state=self._state,
            waiting_for="" if service.num_running else service.waiting_for,
            policy_version=self._backend.policy_version,
            progress_age_s=monotonic() - self._watchdog.last_progress,
            progress=service.progress,
            idle_fractions=service.clock.fractions(),
            metrics=self._metrics(service),
        )

    def _metrics(self, service: GeneratorService) -> dict[str, float]:
        return {
            "generator/running": float(service.num_running),
            "generator/slots": float(self._config.generators.max_num_seqs),
            "generator/finished": float(service.num_finished),
            "generator/tokens": float(service.num_tokens),
            "generator/handed_back": float(service.num_handed_back),
            "generator/undelivered": float(self._delivery.num_undelivered),
            "generator/resent": float(self._delivery.num_resent),
            **self._backend.metrics(),
            **self._weights.metrics(),
        }

    def _on_signal(self) -> None:
        if self._ending.done():
            kill_children()
            os._exit(ExitStatus.STOPPED)
        self._end(ExitStatus.STOPPED, "signal")

    def _end(self, status: ExitStatus, reason: str) -> None:
        if not self._ending.done():
            level = logging.INFO if status in _ORDERLY else logging.CRITICAL
            event(log, level, "ending", status=status.name, reason=reason)
            self._ending.set_result(status)

    async def _close(self) -> None:
        self._state = "stopping"
        closing: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._weights.close()),
            asyncio.ensure_future(self._delivery.close()),
            asyncio.wrap_future(in_thread("goodbye", lambda: self._client.close(deadline_s=1.0, reason=self._state))),
            asyncio.ensure_future(self._backend.close()),
        ]
        if self._environment is not None:
            closing.append(asyncio.ensure_future(self._environment.close()))
        await asyncio.wait(closing, timeout=_CLOSE_S)
        self._endpoint.close()
        kill_children()


async def _first_of(*futures: "asyncio.Future[Any]") -> None:
    """Waits until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def kill_children() -> None:
    """Ends every process that this one started, so that none outlives it."""
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue


def run(config: Config, *, name: str) -> ExitStatus:
    """Run a generator until SIGTERM or "drain" (STOPPED), the end of the run (FINISHED), a dead engine (ENGINE_FAILED),
    no progress (UNHEALTHY) or too much memory (MEMORY_LIMIT).

    Raises:
        UserError: the coordinator cannot be reached or refuses this generator.
    """

    async def life() -> ExitStatus:
        return await Generator(config, name=name).run()

    return asyncio.run(life())
