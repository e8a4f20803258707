"""How one test's process is fenced in, from the fork to the last step before untrusted code."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
from dataclasses import dataclass, field
from typing import Any, Final

from . import kernel, landlock, seccomp, view

_STACK_BYTES: Final = 64 << 20
_NUM_FILES: Final = 256
_NAMESPACES_PER_TEST: Final = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS


@dataclass
class Fence:
    """What this fork server found to work and applies to every test.

    Attributes:
        namespaces: each test gets its own pid and mount namespace, inside the server's user, net, ipc and uts ones.
        uids: user of program processes and of test processes.
        filter: seccomp program, empty for none.
        landlock_abi: 0 for none.
        read_only: software paths that the program may read.
        devices: files, or a folder of nothing but such files, that it may read and write.
        cgroup_fds: open `cgroup.procs` files; a program process writes itself into each.
        work: folder of the running test where there are no namespaces, else /tmp of the view.
    """

    namespaces: bool
    uids: dict[str, int]
    filter: bytes = b""
    landlock_abi: int = 0
    read_only: tuple[str, ...] = ()
    devices: tuple[str, ...] = view.DEVICES
    cgroup_fds: tuple[int, ...] = ()
    work: dict[str, str] = field(default_factory=dict)

    def folder(self, role: str) -> str:
        return view.WORK if self.namespaces else self.work[role]

    def clone_flags(self) -> int:
        return _NAMESPACES_PER_TEST if self.namespaces else 0


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(which, (value, value))


def _apply_limits(limits: dict[str, Any]) -> None:
    cpu = int(limits["cpu_s"])
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY or hard > cpu:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    _limit(resource.RLIMIT_AS, int(limits["address_mb"]) << 20)
    _limit(resource.RLIMIT_NPROC, int(limits["max_processes"]))
    _limit(resource.RLIMIT_FSIZE, int(limits["file_mb"]) << 20)
    _limit(resource.RLIMIT_NOFILE, _NUM_FILES)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_STACK, _STACK_BYTES)


def _become(uid: int) -> None:
    # With a single mapped id (no root outside) groups cannot be set, and there are none to lose.
    with contextlib.suppress(PermissionError):
        os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def confine(fence: Fence, *, role: str, limits: dict[str, Any]) -> None:
    """Takes every privilege from the calling process, for good.

    Raises:
        OSError: a step failed; nothing untrusted may run then.
    """
    if role == "program":
        for handle in fence.cgroup_fds:
            os.write(handle, b"0")
    os.setsid()
    _apply_limits(limits)
    _become(fence.uids[role])
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if fence.landlock_abi:
        landlock.restrict(
            abi=fence.landlock_abi,
            read_only=(*fence.read_only, "/proc"),
            writable=(fence.folder(role),),
            devices=fence.devices,
        )
    if fence.filter:
        seccomp.load(fence.filter)


def rewire(*, stdin: int | None, stdout: int | None, keep: list[int]) -> list[int]:
    """Makes the standard descriptors the test's own and closes all others but those kept.

    Returns the new numbers of the kept ones (3 and up), which `exec` does not inherit.
    """
    null = os.open("/dev/null", os.O_RDWR)
    sources = [null if stdin is None else stdin, null if stdout is None else stdout, null, *keep]
    # Copies above every target first, so that no move overwrites the source of another.
    copies = [fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, len(sources)) for source in sources]
    for target, source in enumerate(copies):
        os.dup2(source, target, inheritable=target < 3)
    os.closerange(len(sources), 1 << 16)
    return list(range(3, len(sources)))


def reset_signals() -> None:
    """The defaults of an interpreter, whatever the daemon ignores or blocks; once, in the server."""
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
