"""The supervisor's loop: children, signals and commands from other shells, one thread, no polling of children.

It ends with 0 when every role finished, or when it was told to stop and everything is gone.
"""

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from deploy.local import control
from deploy.local.instance import Instance
from deploy.local.logfiles import rotate_if_large
from deploy.local.notices import NoticeSocket
from deploy.local.specs import STOP_ORDER, RoleSpec
from protocol.config.services import DeploySection
from protocol.errors import ExitStatus, UserError
from protocol.logs import event

log = logging.getLogger(__name__)

TICK_S = 1.0
LAST_PHASE_S = 5.0


class Supervisor:
    """Runs role instances until they are finished or it is told to stop.

    Args:
        run_dir: run folder; logs go to RUN_DIR/logs, state to RUN_DIR/state.
        specs: instances to start, in order.
        settings: the `deploy` section.
        make_spec: builds the spec of (role, index), for scaling.
    """

    def __init__(
        self,
        run_dir: Path,
        specs: Sequence[RoleSpec],
        *,
        settings: DeploySection,
        make_spec: Callable[[str, int], RoleSpec] | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._settings = settings
        self._make_spec = make_spec
        self._selector = selectors.DefaultSelector()
        self._notices = NoticeSocket()
        self._instances = {spec.name: self._instance(spec) for spec in specs}
        self._phases: list[list[Instance]] | None = None
        self._stop_deadline = float("inf")
        self._ending_at = float("inf")
        self._num_signals = 0

    def run(self) -> ExitStatus:
        """Start everything and return when all is over. Needs the main thread (signals)."""
        kill_leftovers(self._run_dir)
        server, path = control.listen()
        wake_read, wake_write = socket.socketpair()
        wake_write.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ, self._accept)
        self._selector.register(self._notices, selectors.EVENT_READ, self._on_notice)
        self._selector.register(wake_read, selectors.EVENT_READ, lambda s: s.recv(64))
        previous_fd = signal.set_wakeup_fd(wake_write.fileno())
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        self._socket_path = path
        self._save()
        try:
            while not self._is_over():
                if self._step(time.monotonic()):
                    self._save()
                self._wait()
            return ExitStatus.FINISHED
        finally:
            for instance in self._instances.values():
                instance.kill()
            self._save()
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            control.close(server, path)
            self._selector.close()
            self._notices.close()
            wake_read.close()
            wake_write.close()

    def snapshot(self) -> dict[str, Any]:
        """What the state file holds; times are Unix seconds."""
        offset = time.time() - time.monotonic()
        me = psutil.Process()
        return {
            "pid": me.pid,
            "created": me.create_time(),
            "socket": str(self._socket_path),
            "stopping": self._phases is not None,
            "roles": [
                {
                    "role": i.spec.role,
                    "name": i.spec.name,
                    "state": i.state,
                    "ready": i.is_ready,
                    "since": i.since + offset,
                    "pids": i.pids,
                    "created": [created for pid in i.pids if (created := _created(pid)) is not None],
                    "num_restarts": i.num_restarts,
                    "last_exit": i.last_exit,
                    "log": str(i.log_path),
                }
                for i in self._instances.values()
            ],
        }

    def stop(self) -> None:
        """Begin an orderly stop: role by role in STOP_ORDER, all within deploy.stop_grace_s (plus 5 s per phase)."""
        if self._phases is not None:
            return
        event(log, logging.INFO, "stopping all roles", grace_s=self._settings.stop_grace_s)
        self._stop_deadline = time.monotonic() + self._settings.stop_grace_s
        everything = list(self._instances.values())
        known = {role for phase in STOP_ORDER for role in phase}
        phases = [[i for i in everything if i.spec.role in phase] for phase in STOP_ORDER]
        self._phases = [[i for i in everything if i.spec.role not in known], *phases]
        self._save()

    # ------------------------------------------------------------ loop

    def _instance(self, spec: RoleSpec) -> Instance:
        logs, address = self._run_dir / "logs", self._notices.address
        return Instance(spec, self._settings, logs, on_start=self._watch, notify_address=address)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        fd = os.pidfd_open(process.pid)
        self._selector.register(fd, selectors.EVENT_READ, self._on_exit)

    def _on_exit(self, fd: Any) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def _on_notice(self, notices: Any) -> None:
        now = time.monotonic()
        for pid, fields in notices.read():
            if any(i.note(pid, fields, now) for i in self._instances.values()) and "READY" in fields:
                self._save()

    def _on_signal(self, number: int, frame: object) -> None:
        self._num_signals += 1

    def _wait(self) -> None:
        now = time.monotonic()
        deadlines = [now + TICK_S]
        for instance in self._instances.values():
            deadlines += [instance.ready_at] if instance.state == "waiting" else []
            deadlines += [instance.kill_at] if instance.state == "stopping" else []
        for key, _ in self._selector.select(max(0.0, min(deadlines) - now)):
            key.data(key.fileobj)

    def _step(self, now: float) -> bool:
        if self._num_signals:
            self.stop()
            if self._num_signals > 1:
                for instance in self._instances.values():
                    instance.kill_at = min(instance.kill_at, now)
                self._stop_deadline = now
        before = [(i.state, i.since) for i in self._instances.values()]
        for instance in self._instances.values():
            if self._phases is not None and instance.state == "waiting":
                instance.stop(now, grace_s=0)
            state = instance.state
            instance.check(now)
            if instance.state != state:
                self._report(instance, state)
            rotate_if_large(instance.log_path, max_bytes=self._settings.log_mb * 2**20)
        self._advance_stop(now)
        self._notice_end(now)
        return before != [(i.state, i.since) for i in self._instances.values()]

    def _report(self, instance: Instance, before: str) -> None:
        failed = instance.state == "waiting" and before == "running"
        fields: dict[str, Any] = {"role": instance.spec.name, "pids": instance.pids}
        if instance.state != "running":
            fields["exit_status"] = describe_exit(instance.last_exit)
        if failed:
            fields["restart_in_s"] = instance.ready_at - instance.since
        event(log, logging.WARNING if failed else logging.INFO, f"role {instance.state}", **fields)

    def _advance_stop(self, now: float) -> None:
        while self._phases and all(i.is_over for i in self._phases[0]):
            self._phases.pop(0)
        for instance in self._phases[0] if self._phases else []:
            if instance.state == "running":
                instance.stop(now, grace_s=max(LAST_PHASE_S, self._stop_deadline - now))

    def _notice_end(self, now: float) -> None:
        """Once coordinator and trainer have finished, the others get the grace time to notice by themselves."""
        main = [i for i in self._instances.values() if i.spec.role in ("coordinator", "trainer")]
        if main and all(i.state == "finished" for i in main):
            self._ending_at = min(self._ending_at, now + self._settings.stop_grace_s)
            if now >= self._ending_at:
                self.stop()

    def _is_over(self) -> bool:
        return all(i.is_over for i in self._instances.values())

    def _save(self) -> None:
        control.write_state(self._run_dir, self.snapshot())

    # ------------------------------------------------------------ commands

    def _accept(self, server: Any) -> None:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            with connection:
                try:
                    answer = self._obey(control.read_line(connection, deadline_s=1.0))
                except (UserError, ValueError) as problem:
                    answer = {"error": str(problem)}
                control.write_line(connection, answer)

    def _obey(self, command: dict[str, Any]) -> dict[str, Any]:
        what = command.get("command")
        if what == "stop":
            self.stop()
        elif self._phases is not None:
            raise UserError("the run is stopping")
        elif what == "scale":
            self._scale(str(command["role"]), int(command["count"]))
        elif what == "restart":
            self._restart(str(command["name"]))
        else:
            raise UserError(f"unknown command {what!r}")
        self._save()
        return self.snapshot()

    def _scale(self, role: str, count: int) -> None:
        if role not in ("generator", "rewardd") or self._make_spec is None:
            raise UserError(f"{role} cannot be scaled: generators and rewardd can")
        now = time.monotonic()
        active = [i for i in self._of_role(role) if not i.is_over]
        for instance in active[count:]:
            instance.stop(now, grace_s=self._settings.stop_grace_s)
        index = 0
        for _ in range(count - len(active)):
            while (name := f"{role}-{index}") in self._instances and not self._instances[name].is_over:
                index += 1
            self._instances[name] = self._instance(self._make_spec(role, index))

    def _restart(self, name: str) -> None:
        matches = [i for i in self._instances.values() if name in (i.spec.name, i.spec.role)]
        if not matches:
            raise UserError(f"no role named {name!r}; there are: {', '.join(self._instances)}")
        for instance in matches:
            instance.stop(time.monotonic(), grace_s=self._settings.stop_grace_s, restart=True)

    def _of_role(self, role: str) -> Iterator[Instance]:
        return (i for i in self._instances.values() if i.spec.role == role)


def describe_exit(status: int | None) -> str:
    """An exit status as a person reads it: name of the documented status, or of the signal."""
    if status is None:
        return "none"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"{status} ({ExitStatus(status).name.lower()})" if status in set(ExitStatus) else str(status)


def kill_leftovers(run_dir: Path) -> list[int]:
    """Kill the sessions of roles that a supervisor, now dead, left behind; returns their pids."""
    state = control.read_state(run_dir)
    if state is None or control.running_state(run_dir) is not None:
        return []
    killed = []
    for role in state["roles"]:
        for pid, created in zip(role["pids"], role["created"], strict=False):
            if control.is_same_process(pid, created):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                    killed.append(pid)
                    event(
                        log, logging.WARNING, "killed a role left by an earlier supervisor", role=role["name"], pid=pid
                    )
    return killed


def _created(pid: int) -> float | None:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None
