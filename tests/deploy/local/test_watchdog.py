"""A role that shows no progress is killed by the supervisor and started again; announced long work is not."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from deploy.local.instance import Instance
from deploy.local.notices import NoticeSocket, Pulse
from deploy.local.specs import RoleSpec
from protocol.config.services import DeploySection
from tests.support.wait import wait_until

SPEAK = """
import os, sys, time
from protocol.notify import Notifier
notifier = Notifier(os.environ)
notifier.ready("up")
print("up", flush=True)
{what}
"""


class Watched:
    """An instance on a clock of the test's, with real processes and a real socket."""

    def __init__(self, what: str, tmp_path: Path) -> None:
        self.notices = NoticeSocket()
        spec = RoleSpec(role="generator", name="generator-0", command=(sys.executable, "-c", SPEAK.format(what=what)))
        settings = DeploySection(watchdog_s=10.0, stop_grace_s=20.0, backoff_s=1.0)
        self.instance = Instance(spec, settings, tmp_path, notify_address=self.notices.address)
        self.now = time.monotonic()
        self.instance.start(self.now)

    def until(self, condition: Callable[[Pulse], bool]) -> None:
        """Until what the process has said meets the condition."""

        def holds() -> bool:
            for pid, fields in self.notices.read():
                self.instance.note(pid, fields, self.now)
            (pulse,) = self.instance.pulses.values()
            return condition(pulse)

        wait_until(holds, deadline_s=60, what="what the process should say")

    def until_ready(self) -> None:
        self.until(lambda pulse: pulse.is_ready)

    def later(self, seconds: float) -> str:
        self.now += seconds
        self.instance.check(self.now)
        return self.instance.state

    def close(self) -> None:
        self.instance.kill()
        for process in self.instance.processes:
            process.wait(10)
        self.notices.close()


def test_b55_a_stuck_role_is_killed_and_restarted(tmp_path: Path) -> None:
    watched = Watched("time.sleep(600)", tmp_path)
    try:
        watched.until_ready()
        (pid,) = watched.instance.pids
        assert watched.later(9.0) == "running"
        assert watched.later(2.0) == "running"  # SIGABRT: its stack goes to the log
        wait_until(lambda: watched.later(0.0) == "waiting", what="the end of a role that was aborted")
        assert not psutil.pid_exists(pid) and watched.instance.num_restarts == 1
    finally:
        watched.close()


def test_b55_a_role_deaf_to_the_abort_is_killed(tmp_path: Path) -> None:
    ignore = "import signal; signal.signal(signal.SIGABRT, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    watched = Watched(ignore, tmp_path)
    try:
        watched.until_ready()
        wait_until(lambda: "deaf" in watched.instance.log_path.read_text(), deadline_s=60, what="deaf")
        assert watched.later(11.0) == "running"
        assert watched.later(6.0) == "waiting"
    finally:
        watched.close()


def test_b55_an_announced_long_operation_gets_its_time(tmp_path: Path) -> None:
    watched = Watched("with notifier.long_operation('saving', deadline_s=600.0): time.sleep(600)", tmp_path)
    try:
        watched.until_ready()
        watched.until(lambda pulse: pulse.watchdog_s == 600.0)
        assert watched.later(599.0) == "running"
    finally:
        watched.close()


def test_b56_a_role_that_hangs_while_it_ends_by_itself_is_killed(tmp_path: Path) -> None:
    watched = Watched("notifier.stopping('finished'); time.sleep(600)", tmp_path)
    try:
        watched.until_ready()
        watched.until(lambda pulse: pulse.is_stopping)
        assert watched.later(34.0) == "running"  # grace time and a margin
        watched.later(2.0)
        wait_until(lambda: watched.later(0.0) == "waiting", what="the end of a role that hung")
    finally:
        watched.close()


def test_a_starting_role_is_not_watched_and_strangers_are_not_heard() -> None:
    pulse = Pulse(10.0, stop_s=5.0)
    pulse.note({"STATUS": "loading"}, 0.0)
    assert pulse.silent_s(1e6) == 0.0 and pulse.status == "loading"
    pulse.note({"READY": "1"}, 100.0)
    assert pulse.silent_s(109.0) < 0 < pulse.silent_s(111.0)
    instance = Instance(RoleSpec(role="generator", name="g", command=("true",)), DeploySection(), None)
    assert not instance.note(1, {"READY": "1"}, 0.0)
