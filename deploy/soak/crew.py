"""The processes of a soak: started, hit, and started again when they end."""

import ctypes
import os
import random
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

RESTART_S = 0.5
SPARED_S = 600.0
SPARED_SHARE = 0.15
"""This share of lives is safe from kills and stops for ten minutes, so that growth within a life can be measured."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Member:
    """One process that is kept running. `wake_at` is set while it is frozen, `restart_at` once it has ended;
    until `spared_until` nobody may end it."""

    name: str
    command: Sequence[str]
    process: subprocess.Popen[bytes]
    started: float
    spared_until: float
    wake_at: float = 0.0
    restart_at: float = 0.0
    was_killed: bool = False

    @property
    def is_up(self) -> bool:
        """Running, and not stopped by a signal."""
        return self.process.poll() is None and not self.wake_at


class Crew:
    """Members by name; logs are FOLDER/NAME.log.

    Args:
        seed: of the draw of lives that are spared.
        on_end: told (member, exit status) once for each life that ends.
    """

    def __init__(self, logs: Path, *, seed: int, on_end: Callable[[Member, int], None]) -> None:
        self.members: dict[str, Member] = {}
        self.num_restarts = 0
        self._logs = logs
        self._random = random.Random(seed)
        self._on_end = on_end
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: Sequence[str]) -> None:
        """One more life of `name`; it dies with this process."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (self._logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, preexec_fn=_die_with_parent
            )
        now = monotonic()
        spared_s = SPARED_S if self._random.random() < SPARED_SHARE else 0.0
        self.members[name] = Member(name, command, process, started=now, spared_until=now + spared_s)

    def tend(self) -> None:
        """Wakes who was frozen long enough and starts again what has ended."""
        now = monotonic()
        for member in list(self.members.values()):
            if member.wake_at and now >= member.wake_at:
                member.process.send_signal(signal.SIGCONT)
                member.wake_at = 0.0
            status = member.process.poll()
            if status is None:
                continue
            if not member.restart_at:
                member.restart_at = now + RESTART_S
                self._on_end(member, status)
            elif now >= member.restart_at:
                self.num_restarts += 1
                self.start(member.name, member.command)

    def kill(self, member: Member) -> None:
        """kill -9."""
        member.was_killed = True
        member.process.kill()

    def freeze(self, member: Member, *, seconds: float) -> None:
        """SIGSTOP now, SIGCONT by `tend` after `seconds`."""
        member.wake_at = monotonic() + seconds
        member.process.send_signal(signal.SIGSTOP)

    def wake_all(self) -> None:
        """SIGCONT to everything frozen."""
        for member in self.members.values():
            member.wake_at = member.wake_at and 1.0
        self.tend()

    def wait(self, *, deadline_s: float) -> dict[str, int | None]:
        """Exit status of every member, None for those still there after `deadline_s`."""
        end = monotonic() + deadline_s
        statuses: dict[str, int | None] = {}
        for member in self.members.values():
            try:
                statuses[member.name] = member.process.wait(max(0.1, end - monotonic()))
            except subprocess.TimeoutExpired:
                statuses[member.name] = None
        return statuses

    def close(self) -> None:
        """Ends everything that is still there."""
        for member in self.members.values():
            if member.process.poll() is None:
                member.process.kill()
            member.process.wait()
