"""The sandbox: chooses the strongest isolation that works here, proves it, and lends slots."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import queue
import socket
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from rewardd.code.execution import run_main
from rewardd.code.limits import Limits
from rewardd.code.slot import InfraError, LevelUnavailable, Slot

Level = Literal["auto", "namespaces", "seccomp", "rlimits"]

_LOG: Final = logging.getLogger(__name__)
_LEVELS: Final = ("namespaces", "seccomp", "rlimits")
_DEFAULT_PACKAGES: Final = ("numpy",)
_MAX_CLAIMS: Final = 256
_BORROW_DEADLINE_S: Final = 600.0
_PROBE_LIMITS: Final = Limits(time_limit_s=20.0, memory_mb=512)
# Each entry is what the program managed to do; a level promises that some of these stay empty.
_PROBE: Final = """
import ctypes, json, os, socket, sys
did = {}
def attempt(name, action):
    try:
        did[name] = action()
    except Exception as fault:
        did[name] = None
libc = ctypes.CDLL(None, use_errno=True)
def connect():
    socket.create_connection(("127.0.0.1", PORT), timeout=2).close()
    return True
def reach_abstract():
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect("\\0" + NAME)
    return True
attempt("network", connect)
attempt("abstract_socket", reach_abstract)
attempt("host_file", lambda: len(open(SECRET).read()))
attempt("write_outside", lambda: open(OUTSIDE, "w").write("x"))
attempt("host_process", lambda: os.kill(DAEMON, 0) is None)
attempt("host_memory", lambda: len(open("/proc/%d/maps" % DAEMON).read()) > 0)
attempt("mount", lambda: libc.mount(b"none", b".", b"tmpfs", 0, None) == 0 or None)
attempt("ptrace", lambda: libc.ptrace(16, os.getppid() or 1, 0, 0) == 0 or None)
attempt("root", lambda: os.getuid() == 0 or None)
attempt("own_file", lambda: open("own", "w").write("x"))
attempt("standard_library", lambda: __import__("colorsys") is not None)
attempt("child", lambda: os.fork() or os._exit(0))
print(json.dumps(did))
"""
_NEEDED: Final = {
    "own_file": "it cannot write to its own folder",
    "child": "it cannot start a process",
    "standard_library": "its user cannot read the standard library of the interpreter, give another `interpreter`",
}
_PROMISED: Final = {
    "namespaces": (
        "network",
        "abstract_socket",
        "host_file",
        "write_outside",
        "host_process",
        "host_memory",
        "mount",
        "ptrace",
        "root",
    ),
    "seccomp": ("network", "host_file", "write_outside", "host_process", "host_memory", "mount", "ptrace", "root"),
    "rlimits": ("host_file", "host_process", "host_memory", "mount", "ptrace", "root"),
}


class IsolationUnavailable(ValueError):
    """The isolation asked for cannot be had on this machine; the message says why and what to do."""


def _packages(names: tuple[str, ...] | None) -> dict[str, str]:
    """Folders to bind for each package, with the folder of bundled libraries that wheels put beside it."""
    if names is None:
        names = tuple(name for name in _DEFAULT_PACKAGES if importlib.util.find_spec(name))
    folders: dict[str, str] = {}
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"sandbox package {name!r} is not installed; install it or leave it out")
        folder = Path(next(iter(spec.submodule_search_locations)))
        folders[name] = str(folder)
        libraries = folder.parent / f"{name}.libs"
        if libraries.is_dir():
            folders[libraries.name] = str(libraries)
    return folders


class Sandbox:
    """Runs model-written programs at a proven level of isolation. Thread-safe; one program per slot at a time.

    Levels: `namespaces` (user, pid, mount, net, ipc and uts namespaces, own root view, seccomp, landlock where the
    kernel has it, own user, rlimits, control groups where they can be written), `seccomp` (seccomp, landlock, own
    user, rlimits; needs root) and `rlimits` (own user and rlimits; needs root and has to be asked for by name).
    `auto` takes the strongest of the first two that passes a self-test.

    Args:
        level: the level wanted; a level named is had or refused, never weakened.
        num_slots: programs that run at one time.
        packages: third-party packages that programs may import; default: numpy, if it is installed.
        preload: modules imported once per slot and so free for every program (they add to the cost of a fork).
        interpreter: the Python that runs programs; default: this one.
        uid_base: lowest of two unused user ids per slot, as root; ids that another sandbox holds are passed over.
        use_cgroup: count memory and processes in control groups where possible.

    Raises:
        IsolationUnavailable: no permitted level works here.
    """

    def __init__(
        self,
        level: Level = "auto",
        *,
        num_slots: int = 1,
        packages: tuple[str, ...] | None = None,
        preload: tuple[str, ...] = (),
        interpreter: str | None = None,
        uid_base: int = 64_000,
        use_cgroup: bool = True,
    ) -> None:
        if level not in ("auto", *_LEVELS):
            raise ValueError(f"sandbox level {level!r} is unknown; use auto, namespaces, seccomp or rlimits")
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; at least one is needed")
        self._packages = _packages(packages)
        self._preload = preload
        self._interpreter = os.path.realpath(interpreter or str(getattr(sys, "_base_executable", sys.executable)))
        self._uid_base = uid_base
        self._use_cgroup = use_cgroup
        self._facts: dict[str, Any] = {}
        self._slots: list[Slot] = []
        self._free: queue.Queue[Slot] = queue.Queue()
        self._refusals: dict[str, str] = {}
        self._claims: list[socket.socket] = []
        # Also at the end of the process, for callers that forget.
        self._finalizer = weakref.finalize(self, _stop_all, self._slots, self._claims)
        self.level = self._choose(level)
        for index in range(1, num_slots):
            self._slots.append(self._make_slot(self.level, index))
        for slot in self._slots:
            self._free.put(slot)
        first = self._slots[0]
        parts = {"namespaces": ["namespaces"], "seccomp": [], "rlimits": []}[self.level]
        parts += ["seccomp"] if first.facts["seccomp"] else []
        parts += ["landlock"] if first.facts["landlock_abi"] else []
        parts += ["cgroup"] if first.group is not None else []
        parts += ["rlimits"] + (["uid"] if first.facts["own_uid"] else [])
        self.tier = "+".join(parts)
        _LOG.info("code sandbox ready: tier=%s slots=%d", self.tier, num_slots)

    def _choose(self, level: Level) -> str:
        for candidate in ("namespaces", "seccomp") if level == "auto" else (level,):
            try:
                slot = self._make_slot(candidate, 0)
            except (LevelUnavailable, InfraError) as fault:
                self._refusals[candidate] = str(fault)
                continue
            try:
                self._facts = self._prove(slot, candidate)
            except (IsolationUnavailable, InfraError) as fault:
                slot.stop()
                self._refusals[candidate] = str(fault)
                continue
            self._slots.append(slot)
            return candidate
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self._refusals.items())
        raise IsolationUnavailable(
            f"no isolation for model-written code at level {level!r} ({reasons}). Allow user namespaces, or run as "
            f"root, or name a weaker level"
        )

    def _make_slot(self, level: str, index: int) -> Slot:
        cgroup: Literal["if_possible", "required", "none"] = "if_possible" if self._use_cgroup else "none"
        if self._slots:
            cgroup = "none" if self._slots[0].group is None else "required"
        if os.geteuid() == 0:
            first = _claim_uids(self._uid_base + 2 * index, self._claims)
            uids = {"program": first, "tests": first + 1}
        else:
            uids = {"program": 1000, "tests": 1000}
        return Slot(
            name=str(index),
            level=level,
            uids=uids,
            interpreter=self._interpreter,
            prefix=self._prefix(),
            packages=self._packages,
            preload=self._preload,
            cgroup=cgroup,
        )

    def _prefix(self) -> str:
        return str(Path(self._interpreter).parent.parent)

    def _prove(self, slot: Slot, level: str) -> dict[str, Any]:
        """Lets a program try what the level forbids; raises `IsolationUnavailable` if it manages any of it."""
        name = f"slipstream-probe-{os.getpid()}"
        outside = f"/var/tmp/{name}"
        with contextlib.ExitStack() as stack:
            port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
            abstract.bind("\0" + name)
            abstract.listen()
            secret = stack.enter_context(_private_file())
            constants = {"PORT": port, "NAME": name, "SECRET": secret, "OUTSIDE": outside, "DAEMON": os.getpid()}
            header = "".join(f"{key} = {value!r}\n" for key, value in constants.items())
            try:
                run = run_main(slot, program=header + _PROBE, stdin=b"", limits=_PROBE_LIMITS, time_s=20.0)
            finally:
                written = os.path.exists(outside)
                if written:
                    os.unlink(outside)
        if run.failure is not None:
            raise InfraError(f"the self-test program failed: {run.failure}")
        did: dict[str, Any] = json.loads(run.output)
        did["write_outside"] = written or None
        broken = [promise for promise in _PROMISED[level] if did[promise] is not None]
        if broken:
            raise IsolationUnavailable(f"the self-test program was not stopped: {', '.join(broken)}")
        hindered = [reason for need, reason in _NEEDED.items() if did[need] is None]
        if hindered:
            raise IsolationUnavailable(f"the self-test program was hindered: {', '.join(hindered)}")
        return {key: value is not None for key, value in did.items()}

    def probe(self) -> dict[str, Any]:
        """What was chosen and why: tier, what the self-test program could do, reasons against stronger levels."""
        return {
            "tier": self.tier,
            "level": self.level,
            "could": self._facts,
            "refused": dict(self._refusals),
            "num_slots": len(self._slots),
            "interpreter": self._interpreter,
            "slot_pids": [slot.pid for slot in self._slots],
            "restarts": self.num_restarts,
        }

    @property
    def num_restarts(self) -> int:
        """How often a fork server had to be started again."""
        return sum(slot.num_starts - 1 for slot in self._slots)

    @contextlib.contextmanager
    def slot(self) -> Iterator[Slot]:
        """Lends a free slot; one that failed is restarted before it is lent again.

        Raises:
            InfraError: no slot came free in time, or its server cannot be started.
        """
        try:
            slot = self._free.get(timeout=_BORROW_DEADLINE_S)
        except queue.Empty:
            raise InfraError(f"no sandbox slot came free within {_BORROW_DEADLINE_S:.0f} s") from None
        try:
            if not slot.is_up:
                slot.start()
            yield slot
        except LevelUnavailable as fault:
            raise InfraError(f"cannot restart the fork server: {fault}") from fault
        except BaseException:
            # Something of the slot may still be under way; a fresh server has no past.
            slot.stop()
            raise
        finally:
            self._free.put(slot)

    def close(self) -> None:
        """Ends every fork server and whatever still runs below it."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _claim_uids(lowest: int, claims: list[socket.socket]) -> int:
    """First of two user ids that no other sandbox of this machine holds: what is left of a test is killed by user.

    A claim is the name of an abstract socket, so that it ends with its process.
    """
    for first in range(lowest, lowest + 2 * _MAX_CLAIMS, 2):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0slipstream-code-uid-{first}")
        except OSError:
            claim.close()
            continue
        claims.append(claim)
        return first
    raise InfraError(f"no free user ids from {lowest} on; give another `uid_base`")


def _stop_all(slots: list[Slot], claims: list[socket.socket]) -> None:
    for slot in slots:
        slot.stop()
    for claim in claims:
        claim.close()


@contextlib.contextmanager
def _private_file() -> Iterator[str]:
    with tempfile.NamedTemporaryFile(prefix="slipstream-probe-") as file:
        file.write(b"secret")
        file.flush()
        yield file.name
