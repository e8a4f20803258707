"""The fork server of one slot: a small warm interpreter that forks one confined process per test.

It never sees an expected output, so nothing a program could find in its memory or in that of its ancestors is worth
finding. Requests and replies are length-prefixed JSON on the socket named in argv; a request carries the descriptors of
its test.
Every process it starts is gone and reaped before it answers. It ends when its parent closes the socket.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from . import confine, kernel, landlock, prelude, program, seccomp, serve, sweep, testrun, view

# Common in programs and cheap to carry through a fork; the rest is imported from disk by those that need it.
_PRELOADED: Final = (
    "array",
    "ast",
    "bisect",
    "calendar",
    "cmath",
    "collections",
    "contextlib",
    "copy",
    "ctypes",
    "dataclasses",
    "datetime",
    "decimal",
    "encodings.ascii",
    "encodings.idna",
    "encodings.latin_1",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "io",
    "itertools",
    "json",
    "linecache",
    "math",
    "numbers",
    "operator",
    "queue",
    "random",
    "re",
    "resource",
    "signal",
    "statistics",
    "string",
    "struct",
    "threading",
    "time",
    "traceback",
    "types",
    "typing",
    "unicodedata",
)


@dataclass
class Job:
    """One running test: its supervisor, a handle on it, and the pipe on which it says how it went."""

    number: int
    pid: int
    pidfd: int
    notes: int
    role: str
    killed: bool = False


class Server:
    """Serves one slot.

    Args:
        control: the socket to the trusted parent.
        fence: what confines every test.
    """

    def __init__(self, *, control: socket.socket, fence: confine.Fence) -> None:
        self._control = control
        self._fence = fence
        self._prelude = prelude.names()
        self._jobs: dict[int, Job] = {}
        self._by_fd: dict[int, Job] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> None:
        """Until the parent goes away."""
        while True:
            for handle, _ in self._poll.poll():
                if handle in self._by_fd:
                    self._finish(self._by_fd[handle])
                elif not self._obey():
                    for job in list(self._jobs.values()):
                        os.kill(job.pid, signal.SIGKILL)
                        self._finish(job)
                    return

    def _obey(self) -> bool:
        message = receive(self._control)
        if message is None:
            return False
        request, handles = message
        if request["op"] == "start":
            self._start(request, handles)
        elif request["op"] == "kill":
            job = self._jobs.get(request["job"])
            if job is not None and not job.killed:
                job.killed = True
                os.kill(job.pid, signal.SIGKILL)
        return True

    def _start(self, request: dict[str, Any], handles: list[int]) -> None:
        notes_read, notes_write = os.pipe()
        try:
            pid = kernel.fork_into(self._fence.clone_flags())
        except OSError as fault:
            for handle in (notes_read, notes_write, *handles):
                os.close(handle)
            send(self._control, {"job": request["job"], "error": f"cannot start a process: {fault}"})
            return
        if pid == 0:
            supervise(self._fence, request, handles, notes_write, self._prelude)
        for handle in (notes_write, *handles):
            os.close(handle)
        job = Job(request["job"], pid, os.pidfd_open(pid), notes_read, request["role"])
        self._jobs[job.number] = job
        self._by_fd[job.pidfd] = job
        self._poll.register(job.pidfd, select.POLLIN)

    def _finish(self, job: Job) -> None:
        _, _, usage = os.wait4(job.pid, 0)
        self._poll.unregister(job.pidfd)
        os.close(job.pidfd)
        del self._jobs[job.number], self._by_fd[job.pidfd]
        if not self._fence.namespaces:
            sweep.kill_user(self._fence.uids[job.role], spare=frozenset(other.pid for other in self._jobs.values()))
            sweep.empty(self._fence.work[job.role])
        reply: dict[str, Any] = {"job": job.number, "killed": job.killed, "cpu_s": usage.ru_utime + usage.ru_stime}
        text = b""
        os.set_blocking(job.notes, False)
        try:
            while chunk := os.read(job.notes, 4096):
                text += chunk
        except BlockingIOError:
            # A program of a tier without namespaces cannot hold this pipe, its supervisor closed it first.
            pass
        os.close(job.notes)
        lines = text.decode("utf-8", "replace").split("\n")
        reply["ready"] = "ready" in lines
        for line in lines:
            if line.startswith("status "):
                reply["status"] = int(line[7:])
            elif line.startswith("error "):
                reply["error"] = line[6:]
        send(self._control, reply)


def supervise(
    fence: confine.Fence, request: dict[str, Any], handles: list[int], notes: int, offered: dict[str, Any]
) -> None:
    """The first process of a test (init of its pid namespace): forks the program, waits for it, and ends.

    Its end takes every process of the namespace along.
    """
    role = request["role"]
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if fence.namespaces:
            view.freshen(file_mb=request["limits"]["file_mb"], uid=fence.uids[role])
        else:
            os.chdir(fence.work[role])
        pid = kernel.fork_into(0)
        if pid == 0:
            _become_program(fence, request, handles, notes, offered)
        for handle in handles:
            os.close(handle)
        while True:
            ended, status = os.wait()
            if ended == pid:
                break
        os.write(notes, b"status %d\n" % status)
    except BaseException as fault:
        os.write(notes, f"error {type(fault).__name__}: {fault}\n".encode())
    os._exit(0)


def _become_program(
    fence: confine.Fence, request: dict[str, Any], handles: list[int], notes: int, offered: dict[str, Any]
) -> None:
    try:
        given = dict(zip(request["fds"], handles, strict=True))
        confine.confine(fence, role=request["role"], limits=request["limits"])
        os.write(notes, b"ready\n")
        kept = confine.rewire(
            stdin=given.get("stdin"),
            stdout=given.get("stdout"),
            keep=[given[name] for name in ("channel", "link", "tests") if name in given],
        )
        # The hooks that `fork_into` left out would have done this.
        random.seed()
    except BaseException as fault:
        os.write(notes, f"error {type(fault).__name__}: {fault}\n".encode())
        os._exit(1)
    _dispatch(request, kept, offered)


def _dispatch(request: dict[str, Any], kept: list[int], offered: dict[str, Any]) -> NoReturn:
    mode, channel = request["mode"], kept[0]
    if mode == "stdin":
        program.run_main(request["program"], channel)
    if mode == "function":
        program.run_function(
            request["program"], channel, name=request["function"], arguments=request["arguments"], prelude=offered
        )
    if mode == "serve":
        serve.run(
            request["program"],
            channel=channel,
            link_handle=kept[1],
            prefix=request["prefix"],
            class_names=request["class_names"],
            prelude=offered,
        )
    testrun.run(
        kept[2],
        channel=channel,
        link_handle=kept[1],
        first=request["first"],
        early_exit=request["early_exit"],
        prelude=offered,
    )


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request and its descriptors; None once the peer has gone."""
    head, handles, _, _ = socket.recv_fds(control, 4, 8)
    if len(head) < 4:
        return None
    (size,) = struct.unpack("=I", head)
    body = bytearray()
    while len(body) < size:
        chunk = control.recv(min(size - len(body), 1 << 20))
        if not chunk:
            return None
        body += chunk
    return json.loads(body), handles


def send(control: socket.socket, reply: dict[str, Any]) -> None:
    body = json.dumps(reply).encode()
    control.sendall(struct.pack("=I", len(body)) + body)


def _enter_namespaces(settings: dict[str, Any]) -> None:
    """The namespaces all tests of the slot share; a helper outside writes the user map, which takes privilege."""
    unshared_read, unshared_write = os.pipe()
    euid, egid = os.geteuid(), os.getegid()
    uids = sorted(set(settings["uids"].values()))
    if euid == 0:
        lines = "\n".join(["0 0 1", *(f"{uid} {uid} 1" for uid in uids)])
        maps = {"uid_map": lines, "gid_map": lines}
    else:
        maps = {"setgroups": "deny", "uid_map": f"{uids[0]} {euid} 1", "gid_map": f"{uids[0]} {egid} 1"}
    server = os.getpid()
    helper = os.fork() if euid == 0 else None
    if helper == 0:
        os.close(unshared_write)
        os.read(unshared_read, 1)
        try:
            _write_maps(f"/proc/{server}", maps)
        except OSError:
            os._exit(1)
        os._exit(0)
    kernel.unshare(
        kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    )
    os.write(unshared_write, b"x")
    if helper is None:
        _write_maps("/proc/self", maps)
    elif os.waitpid(helper, 0)[1] != 0:
        raise OSError("cannot write the user map of a new user namespace")
    os.close(unshared_read)
    os.close(unshared_write)
    socket.sethostname("sandbox")
    view.build(prefix=settings["prefix"], packages=settings["packages"], uid=settings["uids"]["program"])


def _write_maps(folder: str, maps: dict[str, str]) -> None:
    for name, text in maps.items():
        with open(f"{folder}/{name}", "w") as file:
            file.write(text)


def prepare(settings: dict[str, Any]) -> confine.Fence:
    """Applies the level of the settings to this server.

    Raises:
        OSError: the level is not to be had here; the message says which step failed.
    """
    level = settings["level"]
    namespaces = level == "namespaces"
    fence = confine.Fence(namespaces=namespaces, uids=settings["uids"], cgroup_fds=tuple(settings["cgroup_fds"]))
    if not namespaces and os.geteuid() != 0:
        raise OSError(f"level {level!r} needs root, to run programs as another user")
    if level in ("namespaces", "seccomp"):
        fence.filter = seccomp.build()
        fence.landlock_abi = landlock.version()
    if level == "seccomp" and not fence.landlock_abi:
        raise OSError("level 'seccomp' needs landlock, which this kernel lacks")
    software = ["/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/passwd", settings["prefix"]]
    if namespaces:
        _enter_namespaces(settings)
        packages = [view.PACKAGES]
        fence.devices = ("/dev",)
    else:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        fence.work = {role: sweep.make_folder(settings["scratch"], role, uid) for role, uid in fence.uids.items()}
        packages = list(settings["packages"].values())
    paths = sorted({os.path.realpath(path) for path in (*software, *packages)})
    # What lies below another path adds nothing but time.
    fence.read_only = tuple(path for path in paths if not any(path.startswith(f"{other}/") for other in paths))
    return fence


def main() -> None:
    """Entry point: `settings` arrive as the first message."""
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    message = receive(control)
    if message is None:
        return
    settings = message[0]
    try:
        fence = prepare(settings)
    except (OSError, ValueError) as fault:
        send(control, {"ok": False, "error": str(fault)})
        return
    sys.path[:] = [path for path in sys.path if path != settings["harness_path"]]
    if settings["packages"]:
        sys.path.extend([view.PACKAGES] if fence.namespaces else settings["package_paths"])
    for name in [*_PRELOADED, *settings["preload"]]:
        importlib.import_module(name)
    # No module of ours under a name that a program might want, or patch.
    for name in [name for name in sys.modules if name.partition(".")[0] == "inside"]:
        del sys.modules[name]
    program.open_streams()
    confine.reset_signals()
    # Frozen, so that no collection in a child touches, and thereby copies, the pages of the server.
    gc.collect()
    gc.freeze()
    send(
        control,
        {
            "ok": True,
            "landlock_abi": fence.landlock_abi,
            "seccomp": bool(fence.filter),
            "own_uid": os.geteuid() == 0 or not fence.namespaces,
        },
    )
    Server(control=control, fence=fence).serve()
