"""One slot of the sandbox: a fork server process, its control group, and the deadline kept from outside."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from rewardd.code.cgroup import SlotGroup
from rewardd.code.inside import sweep
from rewardd.code.limits import Limits

_START_DEADLINE_S: Final = 30.0
_KILL_DEADLINE_S: Final = 30.0
_STOP_S: Final = 5.0
_FOLLOW_S: Final = 0.5
_READ_BYTES: Final = 1 << 18
_HARNESS_FOLDER: Final = str(Path(__file__).parent)
# All that a program finds in its environment; one thread, since a program has one core and few processes.
_ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_BOOT: Final = "import sys; sys.path.insert(0, sys.argv[1]); from inside.forkserver import main; main()"


class InfraError(RuntimeError):
    """The sandbox itself failed: the program has not been judged."""


class LevelUnavailable(Exception):
    """The fork server could not apply the level asked for; the message says which step failed."""


@dataclass
class Sink:
    """The reading end of one pipe of a test.

    Attributes:
        handle: descriptor; closed by `Slot.watch`.
        limit: bytes; one more and the test is killed with `overflowed` set.
        on_data: called with the sink after each read; a number returned is the new deadline (monotonic).
    """

    handle: int
    limit: int
    on_data: Callable[[Sink], float | None] | None = None
    data: bytearray = field(default_factory=bytearray)
    overflowed: bool = False


@dataclass(frozen=True)
class Ending:
    """How one process of a test ended: `status` is a wait status, None if it was killed from outside."""

    ready: bool
    status: int | None
    killed: bool
    cpu_s: float


class Slot:
    """Starts and holds one fork server; not thread-safe (`Sandbox` lends a slot to one caller at a time).

    Raises:
        LevelUnavailable: the level is not to be had on this machine.
        InfraError: the server did not come up.
    """

    def __init__(
        self,
        *,
        name: str,
        level: str,
        uids: dict[str, int],
        interpreter: str,
        prefix: str,
        packages: dict[str, str],
        preload: tuple[str, ...],
        cgroup: Literal["if_possible", "required", "none"],
    ) -> None:
        self._settings: dict[str, Any] = {
            "level": level,
            "uids": uids,
            "prefix": prefix,
            "packages": packages,
            "preload": preload,
            "harness_path": _HARNESS_FOLDER,
            "package_paths": sorted({os.path.dirname(path) for path in packages.values()}),
        }
        self._interpreter = interpreter
        self._name = name
        self._cgroup = cgroup
        self.group: SlotGroup | None = None
        self.num_starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._next_job = 0
        self._scratch = ""
        self._control = socket.socket(socket.AF_UNIX)
        self.start()

    def start(self) -> None:
        """(Re)starts the fork server."""
        self.stop()
        if self._settings["level"] != "namespaces":
            self._scratch = tempfile.mkdtemp(prefix="slipstream-code-")
            os.chmod(self._scratch, 0o711)
        self.group = None if self._cgroup == "none" else SlotGroup.try_create()
        if self.group is None and self._cgroup == "required":
            raise InfraError("cannot make the control group that this slot's tier promises")
        # The tier is told once: a restart neither loses the group nor gains one.
        self._cgroup = "none" if self.group is None else "required"
        self.num_starts += 1
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        fds = self.group.fds if self.group else ()
        try:
            self._process = subprocess.Popen(
                [self._interpreter, "-I", "-S", "-B", "-c", _BOOT, _HARNESS_FOLDER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=(theirs.fileno(), *fds),
                start_new_session=True,
            )
        except OSError as fault:
            self.stop()
            raise InfraError(f"cannot start {self._interpreter}: {fault}") from fault
        finally:
            theirs.close()
        try:
            self._send({**self._settings, "cgroup_fds": list(fds), "scratch": self._scratch})
            self.facts = self._receive(time.monotonic() + _START_DEADLINE_S)
        except InfraError:
            self.stop()
            raise
        if not self.facts["ok"]:
            self.stop()
            raise LevelUnavailable(self.facts["error"])

    def stop(self) -> None:
        """Ends the server and all it runs; the slot can be started again."""
        self._control.close()
        if self._process is not None:
            try:
                self._process.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
            if self._settings["level"] != "namespaces" and os.geteuid() == 0:
                # A server that was killed could not clean up; in namespaces the kernel does.
                for uid in self._settings["uids"].values():
                    sweep.kill_user(uid, reap=False)
        if self.group is not None:
            self.group.close()
            self.group = None
        if self._scratch:
            with contextlib.suppress(OSError):
                sweep.empty(self._scratch)
                os.rmdir(self._scratch)
            self._scratch = ""

    @property
    def is_up(self) -> bool:
        """Whether the server has been started and has not ended since."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the slot is closed"
        return self._process.pid

    def launch(self, request: dict[str, Any], *, limits: Limits, fds: dict[str, int]) -> int:
        """Starts a process with these descriptors (which stay the caller's); returns its job number."""
        self._next_job += 1
        if self.group is not None and request["role"] == "program":
            try:
                self.group.limit(memory_mb=limits.memory_mb, max_processes=limits.max_processes)
            except OSError as fault:
                raise InfraError(f"cannot set the limits of the control group: {fault}") from fault
        process_limits = limits.for_process(has_cgroup=self.group is not None)
        self._send(
            {**request, "op": "start", "job": self._next_job, "fds": list(fds), "limits": process_limits},
            fds=list(fds.values()),
        )
        return self._next_job

    def watch(
        self, jobs: set[int], *, sinks: list[Sink], deadline: float, leader: int | None = None
    ) -> dict[int, Ending]:
        """Reads the sinks until every job has ended and been reaped; kills all at the deadline, on overflow, or where
        they do not follow the leader's end soon.

        Raises:
            InfraError: a process could not be set up, or the server failed.
        """
        endings: dict[int, Ending] = {}
        poll = select.poll()
        open_sinks = {sink.handle: sink for sink in sinks}
        poll.register(self._control, select.POLLIN)
        for sink in sinks:
            os.set_blocking(sink.handle, False)
            poll.register(sink.handle, select.POLLIN)
        killed_at: float | None = None
        try:
            while jobs - endings.keys():
                now = time.monotonic()
                over = now >= deadline or any(sink.overflowed for sink in sinks)
                if killed_at is None and over:
                    killed_at = now
                    for job in jobs - endings.keys():
                        self._send({"op": "kill", "job": job})
                until = deadline if killed_at is None else killed_at + _KILL_DEADLINE_S
                if killed_at is not None and now >= until:
                    raise InfraError(f"a killed test was not gone after {_KILL_DEADLINE_S:.0f} s")
                for handle, _ in poll.poll(max(0.0, until - now) * 1000 + 1):
                    if handle in open_sinks:
                        sink = open_sinks[handle]
                        if not _drain(sink, once=True):
                            poll.unregister(handle)
                            del open_sinks[handle]
                        later = sink.on_data(sink) if sink.on_data and killed_at is None else None
                        if later is not None and leader not in endings:
                            deadline = later
                    else:
                        self._collect(endings)
                        if leader in endings:
                            # The others end by themselves now, and then say how.
                            deadline = min(deadline, time.monotonic() + _FOLLOW_S)
            for sink in open_sinks.values():
                _drain(sink, once=False)
        finally:
            for sink in sinks:
                os.close(sink.handle)
        return endings

    def _collect(self, endings: dict[int, Ending]) -> None:
        reply = self._receive(time.monotonic() + _START_DEADLINE_S)
        if "error" in reply or (not reply["ready"] and not reply["killed"]):
            raise InfraError(f"cannot set up a test: {reply.get('error', 'its supervisor died')}")
        endings[reply["job"]] = Ending(reply["ready"], reply.get("status"), reply["killed"], reply["cpu_s"])

    def _send(self, message: dict[str, Any], *, fds: list[int] | None = None) -> None:
        body = json.dumps(message).encode()
        self._control.settimeout(_START_DEADLINE_S)
        try:
            socket.send_fds(self._control, [struct.pack("=I", len(body))], fds or [])
            self._control.sendall(body)
        except OSError as fault:
            raise InfraError(f"the fork server of slot {self._name} is gone: {fault}") from fault

    def _receive(self, deadline: float) -> dict[str, Any]:
        (size,) = struct.unpack("=I", self._read(4, deadline))
        reply = json.loads(self._read(size, deadline))
        assert isinstance(reply, dict)
        return reply

    def _read(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            self._control.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                chunk = self._control.recv(size - len(data))
            except OSError as fault:
                raise InfraError(f"the fork server of slot {self._name} does not answer: {fault}") from fault
            if not chunk:
                raise InfraError(f"the fork server of slot {self._name} has ended by itself")
            data += chunk
        return data


def _drain(sink: Sink, *, once: bool) -> bool:
    """Reads what is there; False at end of file."""
    while True:
        try:
            chunk = os.read(sink.handle, _READ_BYTES)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        room = sink.limit - len(sink.data)
        if len(chunk) > room:
            sink.overflowed = True
        sink.data += chunk[: max(0, room)]
        if once or sink.overflowed:
            return True
