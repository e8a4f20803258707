"""One supervised role instance: start, watch, stop, restart with growing delay. No loop and no clock of its own.

waiting --start--> running --exit 0--> finished
   ^                  |--other exit--> waiting (after back-off)
   |                  '--stop--> stopping --all gone--> stopped
   '--restart---------------------------'
"""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from deploy.local.notices import Pulse
from deploy.local.specs import RoleSpec
from protocol.config.services import DeploySection
from protocol.errors import ExitStatus
from protocol.logs import event

log = logging.getLogger(__name__)

State = Literal["waiting", "running", "stopping", "finished", "stopped"]

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
DUMP_S = 5.0
"""From SIGABRT, at which a role prints its stack and ends, to SIGKILL."""
STOP_MARGIN_S = 15.0
"""A process that ends by itself gets this beyond the grace time of a stop before it is killed."""
STEADY_S = 60.0
"""A process that lived this long starts its back-off anew."""


def die_with_parent() -> None:
    """Ask for SIGTERM when the parent dies; for preexec_fn of a child."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass
class Instance:
    """A role instance and its processes (one per rank).

    Attributes:
        ready_at: monotonic time of the next start while waiting.
        log_dir: folder of the log file; None: the processes share this one's output.
        kill_at: monotonic time at which stopping turns into killing.
        num_restarts: restarts after failures.
        last_exit: exit status of the last process that ended (negative: by that signal).
        notify_address: NOTIFY_SOCKET of the processes; "" = they are not watched.
        pulses: what each process has said of itself, by pid.
    """

    spec: RoleSpec
    settings: DeploySection
    log_dir: Path | None
    state: State = "waiting"
    since: float = 0.0
    ready_at: float = 0.0
    kill_at: float = float("inf")
    num_restarts: int = 0
    last_exit: int | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    notify_address: str = ""
    pulses: dict[int, Pulse] = field(default_factory=dict)
    on_start: Callable[[subprocess.Popen[bytes]], None] = lambda process: None
    _delay_s: float = 0.0
    _restart_after_stop: bool = False

    @property
    def log_path(self) -> Path:
        """Standard output and error of all ranks and all starts."""
        assert self.log_dir is not None
        return self.log_dir / f"{self.spec.name}.log"

    def _open_log(self) -> contextlib.AbstractContextManager[IO[bytes] | None]:
        if self.log_dir is None:
            return contextlib.nullcontext()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        return self.log_path.open("ab")

    @property
    def pids(self) -> list[int]:
        """Processes alive."""
        return [p.pid for p in self.processes if p.poll() is None]

    @property
    def is_over(self) -> bool:
        """Nothing runs and nothing will start by itself."""
        return self.state in ("finished", "stopped")

    def start(self, now: float) -> None:
        """Start all ranks, each in a session of its own, told to stop when the supervisor dies."""
        self.pulses.clear()
        with self._open_log() as output:
            for environment in self.spec.environment()[: self.spec.num_ranks]:
                process = subprocess.Popen(
                    self.spec.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output and subprocess.STDOUT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **self._notify_environment(), **environment},
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
                self.processes.append(process)
                self.pulses[process.pid] = Pulse(
                    self.spec.watchdog_s(self.settings), stop_s=self.settings.stop_grace_s + STOP_MARGIN_S
                )
                self.on_start(process)
        self._enter("running", now)

    def _notify_environment(self) -> dict[str, str]:
        if not self.notify_address:
            return {}
        watchdog_us = f"{self.spec.watchdog_s(self.settings) * 1e6:.0f}"
        return {"NOTIFY_SOCKET": self.notify_address, "WATCHDOG_USEC": watchdog_us, "WATCHDOG_PID": ""}

    def note(self, pid: int, fields: dict[str, str], now: float) -> bool:
        """Take in what a process says; False when it is none of this instance's."""
        pulse = self.pulses.get(pid)
        if pulse is not None:
            pulse.note(fields, now)
        return pulse is not None

    @property
    def is_ready(self) -> bool:
        """Every process has said that its start-up is over."""
        return bool(self.processes) and all(p.is_ready for p in self.pulses.values())

    def check(self, now: float) -> None:
        """Notice exits and passed deadlines, and act on them."""
        if self.state == "waiting" and now >= self.ready_at:
            self.start(now)
        elif self.state == "running":
            self._check_running(now)
        elif self.state == "stopping":
            if now >= self.kill_at:
                self.kill()
            if not self.pids:
                self._reap()
                self._after_stop(now)

    def stop(self, now: float, *, grace_s: float, restart: bool = False) -> None:
        """SIGTERM to every rank, SIGKILL to whole sessions after `grace_s`; with `restart`, start again afterwards."""
        self._restart_after_stop = restart
        if self.state == "waiting":
            self._after_stop(now)
        elif self.state == "running":
            self._signal(signal.SIGTERM)
            self.kill_at = now + grace_s
            self._enter("stopping", now)
        elif self.is_over and restart:
            self._after_stop(now)

    def kill(self) -> None:
        """SIGKILL to the sessions of all ranks, helpers included."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _check_running(self, now: float) -> None:
        exits = [p.poll() for p in self.processes]
        failed = [code for code in exits if code not in (None, 0)]
        if not failed and self._is_silent(now):
            failed = [int(ExitStatus.UNHEALTHY)]
        if failed:
            self.last_exit = failed[0]
            lived_s = now - self.since
            self._delay_s = min(
                self.settings.max_backoff_s,
                self.settings.backoff_s if lived_s >= STEADY_S or not self._delay_s else 2 * self._delay_s,
            )
            self.kill()
            self._reap()
            self.num_restarts += 1
            self.ready_at = now + self._delay_s
            self._enter("waiting", now)
        elif all(code == 0 for code in exits):
            self.last_exit = 0
            self.kill()
            self._reap()
            self._enter("finished", now)

    def _is_silent(self, now: float) -> bool:
        for pid, pulse in self.pulses.items():
            if pulse.silent_s(now) > 0 and pulse.may_dump:
                pulse.may_dump = False
                pulse.fed_at += DUMP_S
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
                event(
                    log,
                    logging.ERROR,
                    "no progress: the stack goes to the log, then it is killed",
                    role=self.spec.name,
                    pid=pid,
                    silent_s=now - pulse.fed_at,
                    allowed_s=pulse.watchdog_s,
                    last_status=pulse.status,
                )
            elif pulse.silent_s(now) > 0:
                return True
        return False

    def _after_stop(self, now: float) -> None:
        self.kill_at = float("inf")
        if self._restart_after_stop:
            self.ready_at, self._delay_s = now, 0.0
            self._enter("waiting", now)
        else:
            self._enter("stopped", now)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def _reap(self) -> None:
        """Collect the ranks; whatever they left in their sessions is killed."""
        self.kill()
        for process in self.processes:
            code = process.wait()
            self.last_exit = code if self.state == "stopping" else self.last_exit
        self.processes.clear()

    def _enter(self, state: State, now: float) -> None:
        self.state, self.since = state, now
