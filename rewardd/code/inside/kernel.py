"""Thin ctypes bindings for the Linux calls that the standard library lacks. Every failure is an `OSError`."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
from typing import Any, Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000
MNT_DETACH: Final = 2

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_SECCOMP: Final = 22
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_NO_NEW_PRIVS: Final = 38

_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_MOUNT_ATTR_RDONLY_NOSUID: Final = 0x1 | 0x2
_CAPABILITY_VERSION_3: Final = 0x20080522

MACHINE: Final = platform.machine()
_X86: Final = {"clone": 56, "capset": 126, "pivot_root": 155}
_ARM: Final = {"clone": 220, "capset": 91, "pivot_root": 41}
_COMMON: Final = {
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}
NUMBERS: Final[dict[str, int]] = {**(_ARM if MACHINE == "aarch64" else _X86), **_COMMON}

_libc = ctypes.CDLL(None, use_errno=True)
_holding_gil = ctypes.PyDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def call(name: str, *arguments: Any) -> int:
    """The raw system call `name` of `NUMBERS`."""
    return _checked(_libc.syscall(NUMBERS[name], *arguments), name)


def prctl(option: int, argument: Any = 0, *rest: Any) -> int:
    padded = [*rest, 0, 0, 0][:3]
    return _checked(_libc.prctl(option, argument, *padded), f"prctl({option})")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _checked(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount on {target}")


def unmount(target: str) -> None:
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def make_read_only(target: str) -> None:
    """Marks the mount and all below it read-only and nosuid (Linux 5.12 and later)."""
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY_NOSUID, 0, 0, 0)
    call("mount_setattr", _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))


def pivot_root(new_root: str, put_old: str) -> None:
    call("pivot_root", new_root.encode(), put_old.encode())


def drop_capabilities() -> None:
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    call("capset", header, bytes(24))


def fork_into(flags: int) -> int:
    """`os.fork` for a process of one thread, whose child starts in the new namespaces of `flags`.

    One fork instead of unshare and a second one; and without the interpreter's fork hooks, which reset what only
    threads need (a third of a millisecond). After flags other than 0 the C library's idea of the child's thread id is
    stale until the child itself forks, so untrusted code belongs in a grandchild.
    """
    if flags:
        pid = _holding_gil.syscall(NUMBERS["clone"], ctypes.c_long(flags | signal.SIGCHLD), 0, 0, 0, 0)
    else:
        pid = _holding_gil.fork()
    return _checked(pid, f"clone({flags:#x})")
