"""Cleaning up after a test where there is no pid and mount namespace to do it."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from typing import Final

_DEADLINE_S: Final = 20.0
_PAUSE_S: Final = 0.002


def kill_user(uid: int, *, reap: bool = True, spare: frozenset[int] = frozenset()) -> None:
    """Kills every process of a user that runs nothing but one slot's programs, until none is left.

    Args:
        reap: the caller is the subreaper to which they fall; it also kills all at one stroke, as that user.
        spare: children that are waited for elsewhere.

    Raises:
        OSError: processes were still there at the deadline.
    """
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        if reap:
            _kill_as(uid)
            _reap(spare)
        alive = _processes_of(uid)
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        select.select([], [], [], _PAUSE_S)
    raise OSError(f"processes of user {uid} outlived SIGKILL")


def _kill_as(uid: int) -> None:
    killer = os.fork()
    if killer == 0:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        with contextlib.suppress(OSError):
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(killer, 0)


def _reap(spare: frozenset[int]) -> None:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = {int(text) for text in file.read().split()}
    for pid in children - spare:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _processes_of(uid: int) -> list[int]:
    """Processes whose real user is `uid`, zombies included: they too count until reaped."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/status") as file:
                    text = file.read()
            except OSError:
                continue
            if int(text.partition("\nUid:")[2].split(None, 1)[0]) == uid:
                found.append(int(name))
    return found


def make_folder(scratch: str, role: str, uid: int) -> str:
    """A private folder of one role's user below `scratch`."""
    path = os.path.join(scratch, role)
    os.mkdir(path, 0o700)
    os.chown(path, uid, uid)
    return path


def empty(folder: str) -> None:
    """Removes all below the folder without following a link (`rmtree` walks by descriptors)."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
