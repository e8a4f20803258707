"""All trainer ranks of one machine as one foreground process: what systemd, Ray and Slurm start.

The ranks live and die together; the first failure ends the rest, and the whole ends with its status. Towards the
service manager it speaks for all of them: ready when every rank is, alive only while every rank makes progress.
"""

import contextlib
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator

from deploy.local.instance import Instance
from deploy.local.notices import NoticeSocket
from deploy.local.specs import RoleSpec, trainer_environment, trainer_watchdog_s
from protocol.config import Config
from protocol.errors import ExitStatus, UserError
from protocol.logs import event
from protocol.notify import notifier

log = logging.getLogger(__name__)

TICK_S = 1.0


def needs_launcher(config: Config) -> bool:
    """Whether this process has to start ranks rather than be one (torchrun and the supervisor set RANK)."""
    return "RANK" not in os.environ and config.trainer.num_ranks * config.trainer.num_nodes > 1


def node_rank_of(config: Config, *, given: int | None) -> int:
    """This machine's number among the trainer's: as given, or of NODE_RANK or SLURM_NODEID, or 0 for a single one.

    Raises:
        UserError: several machines and nothing tells which one this is.
    """
    known = [os.environ[name] for name in ("NODE_RANK", "SLURM_NODEID") if name in os.environ]
    node_rank = given if given is not None else int(known[0]) if known else 0
    if given is None and not known and config.trainer.num_nodes > 1:
        raise UserError(f"trainer.num_nodes = {config.trainer.num_nodes}: say which machine this is with --node-rank")
    if not 0 <= node_rank < config.trainer.num_nodes:
        raise UserError(
            f"node rank {node_rank} is not below trainer.num_nodes = {config.trainer.num_nodes}: see trainer.num_nodes"
        )
    return node_rank


def run_ranks(config: Config, *, command: tuple[str, ...], name: str, node_rank: int) -> ExitStatus | int:
    """Start this machine's ranks, each by `command`, and pass on signals; ends as the first failed rank does."""
    notices = NoticeSocket()
    ranks = Instance(
        RoleSpec(
            role="trainer",
            name=name,
            command=command,
            num_ranks=config.trainer.num_ranks,
            environment=lambda: trainer_environment(config, node_rank=node_rank),
            min_watchdog_s=trainer_watchdog_s(config),
        ),
        config.deploy,
        log_dir=None,
        notify_address=notices.address,
    )
    try:
        return _Launcher(ranks, notices, grace_s=config.deploy.stop_grace_s).run()
    finally:
        ranks.kill()
        notices.close()


class _Launcher:
    def __init__(self, ranks: Instance, notices: NoticeSocket, *, grace_s: float) -> None:
        self._ranks, self._notices, self._grace_s = ranks, notices, grace_s
        self._num_signals = 0
        self._was_ready = False
        self._seen_feeds: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()

    def run(self) -> ExitStatus | int:
        ranks = self._ranks
        with self._signals():
            self._selector.register(self._notices, selectors.EVENT_READ)
            ranks.on_start = self._watch
            ranks.start(time.monotonic())
            while ranks.state in ("running", "stopping"):
                self._turn()
                ranks.check(time.monotonic())
        if ranks.state == "stopped":
            return ExitStatus.STOPPED
        status = ranks.last_exit or 0
        event(log, logging.INFO if status == 0 else logging.ERROR, "ranks ended", status=status)
        return ExitStatus.FAILED if status < 0 else status

    def _watch(self, process: object) -> None:
        fd = os.pidfd_open(process.pid)  # type: ignore[attr-defined]
        self._selector.register(fd, selectors.EVENT_READ)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        wake_read, wake_write = socket.socketpair()
        wake_write.setblocking(False)
        self._selector.register(wake_read, selectors.EVENT_READ)
        previous_fd = signal.set_wakeup_fd(wake_write.fileno())
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, int):
                    os.close(key.fileobj)
            self._selector.close()
            wake_read.close()
            wake_write.close()

    def _on_signal(self, number: int, frame: object) -> None:
        self._num_signals += 1

    def _turn(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.recv(64)
            elif isinstance(key.fileobj, int):
                self._selector.unregister(key.fileobj)
                os.close(key.fileobj)
        now = time.monotonic()
        for pid, fields in self._notices.read():
            self._ranks.note(pid, fields, now)
        self._pass_on()
        if self._num_signals and self._ranks.state == "running":
            notifier().stopping("signal")
            self._ranks.stop(now, grace_s=self._grace_s)
        if self._num_signals > 1:
            self._ranks.kill()

    def _pass_on(self) -> None:
        """Ready once all ranks are; a sign of progress once every rank has given one since the last."""
        if self._ranks.is_ready and not self._was_ready:
            self._was_ready = True
            notifier().ready(f"{len(self._ranks.pulses)} ranks")
        allowed_s = max((pulse.watchdog_s for pulse in self._ranks.pulses.values()), default=0.0)
        if self._was_ready and allowed_s != notifier().watchdog_s:
            notifier().allow_silence(allowed_s)
        feeds = {pid: pulse.num_feeds for pid, pulse in self._ranks.pulses.items()}
        if feeds and all(count > self._seen_feeds.get(pid, 0) for pid, count in feeds.items()):
            self._seen_feeds = feeds
            notifier().progress()
