"""The coordinator process: opens the run folder, binds, and loops over poll, handle, commit, send."""

import errno
import logging
import signal
import sqlite3
import time
from collections import deque
from pathlib import Path
from types import FrameType

from learner.coordinator.exporter import MetricsExporter
from learner.coordinator.facts import RunFacts
from learner.coordinator.journal import Journal
from learner.coordinator.metrics import RecordFile
from learner.coordinator.schema import open_database
from learner.coordinator.service import Coordinator
from learner.coordinator.startup import load_data, lock_run_folder, wall_anchored_clock
from learner.coordinator.store import Store
from learner.data.tokenization import PromptTokenizer
from learner.packing import model_shape
from learner.sinks.load import Sinks
from protocol.config import Config
from protocol.errors import ExitStatus, MessageTooLarge, UserError
from protocol.logs import event, setup_logging
from protocol.messages import Refused
from protocol.notify import notifier
from protocol.sockets import Received, Server, new_incarnation
from protocol.versions import tokenizer_hash

log = logging.getLogger(__name__)


def run(config: Config, *, name: str) -> ExitStatus:
    """Runs the coordinator until the run is finished or stopped.

    Raises UserError, within seconds and before anything is changed, when the run folder cannot be used, the address
    is taken, or the data cannot be read.
    """
    setup_logging("coordinator", name)
    stop = _StopFlag()
    folder = Path(config.run.dir)
    lock = lock_run_folder(folder)
    store = Store(open_database(folder / "coordinator" / "ledger.sqlite"))
    segment_bytes = config.coordinator.segment_mb << 20
    journal = Journal(folder / "coordinator" / "segments", segment_bytes=segment_bytes)
    sinks = Sinks(config, run_id=RunFacts(store).run_id)
    metrics = RecordFile(folder / "metrics.jsonl", on_record=sinks.trained)
    evaluations = RecordFile(folder / "eval.jsonl", on_record=sinks.evaluated)
    incarnation = new_incarnation()
    tokenizer_folder = config.model.tokenizer_path or config.model.path
    hash_of_tokenizer = tokenizer_hash(tokenizer_folder)
    coordinator: list[Coordinator] = []
    server = Server(
        config.coordinator.listen,
        name=name,
        transport=config.transport,
        accept=lambda hello: coordinator[0].accept(hello),
        tokenizer_hash=hash_of_tokenizer,
        setting="coordinator.listen",
    )
    try:
        tokenizer = PromptTokenizer(tokenizer_folder, template_kwargs=config.model.chat_template_kwargs)
        train, held_out = load_data(config, tokenizer)
        coordinator.append(
            Coordinator(
                config,
                train=train,
                evaluation=held_out,
                tokenizer=tokenizer.facts(config.model.path),
                tokenizer_hash=hash_of_tokenizer,
                shape=model_shape(config.model.path),
                store=store,
                journal=journal,
                metrics=metrics,
                evaluations=evaluations,
                clock=wall_anchored_clock(),
                name=name,
                incarnation=incarnation,
                figures=sinks.metrics,
            )
        )
        event(log, logging.INFO, "coordinator ready", address=server.address, run_dir=str(folder), prompts=len(train))
        notifier().ready(f"serving at {server.address}")
        with MetricsExporter(config.coordinator.metrics_port) as exporter:
            return _loop(config, server, coordinator[0], stop, exporter)
    except (OSError, sqlite3.OperationalError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC or "disk is full" in str(error):
            text = f"the disk of {folder} is full; free space and start again: all that was acknowledged is kept"
            raise UserError(text, status=ExitStatus.DISK_FULL) from error
        raise
    finally:
        server.close(deadline_s=min(2.0, config.deploy.stop_grace_s))
        journal.close()
        store.connection.close()
        metrics.close()
        evaluations.close()
        lock.close()
        sinks.close()


class _StopFlag:
    """Set by SIGTERM or SIGINT; a second signal ends the process at once (everything acknowledged is durable)."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.requested = True


def _loop(
    config: Config, server: Server, coordinator: Coordinator, stop: _StopFlag, exporter: MetricsExporter
) -> ExitStatus:
    poll_s = min(0.05, config.transport.heartbeat_s / 4)
    ending = _Ending(config)
    pending: deque[Received] = deque()
    while True:
        if not pending:
            with coordinator.idle.cause("waiting for messages"):
                pending.extend(server.poll(poll_s))
        commit_at = time.monotonic() + config.coordinator.commit_interval_ms / 1000.0
        while pending and time.monotonic() < commit_at:
            received = pending.popleft()
            peer, envelope = received.peer, received.envelope
            coordinator.handle(
                f"{peer.name}/{peer.incarnation}", envelope.body, received.arrays, msg_id=envelope.msg_id
            )
        for peer in server.gone():
            coordinator.gone(f"{peer.name}/{peer.incarnation}", orderly=False)
        coordinator.tick()
        coordinator.commit()
        _send(server, coordinator)
        exporter.update(coordinator)
        notifier().progress()
        if stop.requested:
            notifier().stopping("signal")
            event(log, logging.INFO, "coordinator stops", reason="signal")
            return ExitStatus.STOPPED
        if ending.is_over(coordinator):
            return ExitStatus.FINISHED if coordinator.facts.state == "finished" else ExitStatus.STOPPED


def _send(server: Server, coordinator: Coordinator) -> None:
    for message in coordinator.take_outbox():
        try:
            server.send(message.peer, message.body, arrays=message.arrays, reply_to=message.reply_to)
        except MessageTooLarge as error:
            event(log, logging.ERROR, "message not sent", peer=message.peer, error=str(error))
            server.send(message.peer, Refused(code="too_large", reason=str(error)), reply_to=message.reply_to)


class _Ending:
    """When a finished or stopped run's coordinator may go: its peers have left, or had their time.

    Peers learn the end from heartbeats, so at least three of these pass; a trainer may need long to save.
    """

    def __init__(self, config: Config) -> None:
        self._linger_s = 3 * config.transport.heartbeat_s
        self._grace_s = config.deploy.stop_grace_s
        self._since: float | None = None

    def is_over(self, coordinator: Coordinator) -> bool:
        if coordinator.facts.state not in ("finished", "stopped"):
            self._since = None
            return False
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        waited = now - self._since
        others = coordinator.members.of_role("generator") + coordinator.members.of_role("rewardd")
        if coordinator.members.of_role("trainer"):
            return False  # it is saving; when it dies, the server notices
        return waited > self._linger_s and (not others or waited > self._grace_s)
