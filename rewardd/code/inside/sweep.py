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


def kill_user(uid: int, *, spare: set[int]) -> None:
    """Kills every process of the slot's user and reaps those that fell to this subreaper, until none is left.

    Args:
        uid: a user that runs nothing but this slot's programs.
        spare: supervisors of other tests, which are waited for elsewhere.

    Raises:
        OSError: processes were still there at the deadline.
    """
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        killer = os.fork()
        if killer == 0:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                os._exit(1)
            os._exit(0)
        none_left = os.waitstatus_to_exitcode(os.waitpid(killer, 0)[1]) == 1
        _reap(spare)
        if none_left:
            return
        select.select([], [], [], _PAUSE_S)
    raise OSError(f"processes of user {uid} outlived SIGKILL")


def _reap(spare: set[int]) -> None:
    with contextlib.suppress(ChildProcessError):
        for pid in _children() - spare:
            os.waitpid(pid, os.WNOHANG)


def _children() -> set[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return {int(text) for text in file.read().split()}


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
