"""Cleaning up after a test where there is no pid and mount namespace to do it."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import time
from typing import Final

_DEADLINE_S: Final = 20.0
_PAUSE_S: Final = 0.002
_CHUNK: Final = 500
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


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
    """Removes all below the folder without following a link; nobody else may work in it meanwhile.

    One step down or up at a time: a program may have nested folders deeper than any recursion or path name reaches.
    """
    here = os.open(folder, _FOLDER)
    way: list[str] = []
    try:
        while True:
            with os.scandir(here) as found:
                entries = list(itertools.islice(found, _CHUNK))
            below = next((entry.name for entry in entries if entry.is_dir(follow_symlinks=False)), None)
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=here)
            if below is not None:
                way.append(below)
                here = _move(here, below)
            elif not entries and way:
                here = _move(here, "..")
                os.rmdir(way.pop(), dir_fd=here)
            elif not entries:
                return
    finally:
        os.close(here)


def _move(here: int, name: str) -> int:
    there = os.open(name, _FOLDER, dir_fd=here)
    os.close(here)
    return there
