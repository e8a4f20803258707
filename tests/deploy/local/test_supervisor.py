"""The local supervisor with real processes and real signals, and trivial commands as roles."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.local.control import read_state, request, running_state
from deploy.local.logfiles import rotate_if_large, tail
from deploy.local.specs import RoleSpec
from deploy.local.supervisor import Supervisor, describe_exit
from protocol.config.services import DeploySection
from protocol.errors import UserError

DEADLINE_S = 30.0


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Poll until the condition holds; fail after a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    pytest.fail(f"{what} did not happen in {DEADLINE_S:g} s")


class Running:
    """A supervisor in a process of its own, as `slipstream supervise` runs it."""

    def __init__(self, run_dir: Path, roles: list[dict[str, Any]], settings: dict[str, Any]) -> None:
        self.run_dir = run_dir
        script = textwrap.dedent(f"""
            import json, sys
            from pathlib import Path
            from deploy.local.specs import RoleSpec
            from deploy.local.supervisor import Supervisor
            from protocol.config.services import DeploySection
            from protocol.logs import setup_logging
            setup_logging("supervisor", "test")
            roles = json.loads({json.dumps(json.dumps(roles))})
            def spec(role, name, code, num_ranks=1):
                ranks = lambda: [{{"RANK": str(r)}} for r in range(num_ranks)]
                return RoleSpec(role=role, name=name, command=(sys.executable, "-c", code),
                    num_ranks=num_ranks, environment=ranks)
            sup = Supervisor(Path({str(run_dir)!r}), [spec(**r) for r in roles],
                settings=DeploySection(**{settings!r}),
                make_spec=lambda role, index: spec(role, f"{{role}}-{{index}}", "import time; time.sleep(600)"))
            sys.exit(sup.run())
        """)
        self.log = (run_dir / "supervisor.log").open("wb")
        self.process = subprocess.Popen([sys.executable, "-c", script], stderr=self.log, start_new_session=True)

    def role(self, name: str) -> dict[str, Any]:
        state = read_state(self.run_dir) or {"roles": []}
        return next(
            (r for r in state["roles"] if r["name"] == name), {"state": "absent", "pids": [], "num_restarts": 0}
        )

    def wait_for(self, name: str, state: str) -> dict[str, Any]:
        return eventually(lambda: (r := self.role(name))["state"] == state and r, f"{name} {state}")

    def close(self) -> None:
        while self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.3)
        self.log.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def _start(*roles: dict[str, Any], **settings: Any) -> Running:
        defaults = {"backoff_s": 0.05, "max_backoff_s": 0.2, "stop_grace_s": 10.0}
        started.append(Running(tmp_path, list(roles), {**defaults, **settings}))
        return started[-1]

    yield _start
    for running in started:
        running.close()


SLEEP = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)
PARENT = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "time.sleep(600)"
)
NOTES_ITS_END = """
import signal, sys, time
def end(*_):
    open({path!r}, 'a').write({name!r} + ' ')
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
print('ready', flush=True)
time.sleep(600)
"""


def role(name: str, code: str, kind: str = "generator", **more: Any) -> dict[str, Any]:
    return {"role": kind, "name": name, "code": code, **more}


def test_b54_only_finished_is_not_restarted(start: Callable[..., Running], tmp_path: Path) -> None:
    once = tmp_path / "once"
    fails_once = (
        f"import os, sys; p = {str(once)!r}; done = os.path.exists(p); open(p, 'w'); sys.exit(0 if done else 75)"
    )
    running = start(role("a", "pass"), role("b", fails_once))
    assert running.process.wait(DEADLINE_S) == 0
    assert (running.role("a")["state"], running.role("a")["num_restarts"]) == ("finished", 0)
    assert (running.role("b")["state"], running.role("b")["num_restarts"]) == ("finished", 1)
    assert "exit_status" in (tmp_path / "supervisor.log").read_text()


@pytest.mark.parametrize("status", [1, 64, 70, 73, 143])
def test_b54_every_other_status_is_restarted(start: Callable[..., Running], status: int) -> None:
    running = start(role("a", f"import sys; sys.exit({status})"))
    eventually(lambda: running.role("a")["num_restarts"] >= 3, "three restarts")
    assert running.role("a")["last_exit"] == status


def test_b15_a_killed_role_leaves_no_child_and_is_started_again(start: Callable[..., Running]) -> None:
    running = start(role("a", PARENT))
    pid = running.wait_for("a", "running")["pids"][0]
    children = eventually(lambda: psutil.Process(pid).children(), "the helper's start")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: running.role("a")["num_restarts"] == 1 and running.role("a")["pids"], "the restart")
    eventually(lambda: not children[0].is_running(), "the helper's end")
    assert describe_exit(running.role("a")["last_exit"]) == "killed by SIGKILL"


def test_orderly_stop_takes_producers_first(start: Callable[..., Running], tmp_path: Path) -> None:
    order = tmp_path / "order"
    names = {"coordinator": "coordinator", "trainer": "trainer", "rewardd-0": "rewardd", "generator-0": "generator"}
    running = start(*(role(n, NOTES_ITS_END.format(path=str(order), name=n), k) for n, k in names.items()))
    for name in names:
        eventually(lambda name=name: tail(tmp_path / "logs" / f"{name}.log", num_lines=1), f"{name} ready")
    request(tmp_path, {"command": "stop"})
    assert running.process.wait(DEADLINE_S) == 0
    stopped = order.read_text().split()
    assert sorted(stopped[:2]) == ["generator-0", "trainer"] and stopped[2:] == ["rewardd-0", "coordinator"]
    assert running_state(tmp_path) is None


def test_b57_grace_then_sigkill_and_a_second_signal_kills_at_once(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    running = start(role("a", STUBBORN), stop_grace_s=600)
    running.wait_for("a", "running")
    eventually(lambda: tail(tmp_path / "logs" / "a.log", num_lines=1), "a ready")
    running.process.send_signal(signal.SIGTERM)
    pid = running.wait_for("a", "stopping")["pids"][0]
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(DEADLINE_S) == 0
    assert not psutil.pid_exists(pid)
    assert running.role("a")["last_exit"] == -signal.SIGKILL


def test_stubborn_role_is_killed_after_the_grace_time(start: Callable[..., Running], tmp_path: Path) -> None:
    running = start(role("a", STUBBORN), stop_grace_s=0.2)
    eventually(lambda: tail(tmp_path / "logs" / "a.log", num_lines=1), "a ready")
    request(tmp_path, {"command": "stop"})
    assert running.process.wait(DEADLINE_S) == 0


def test_scale_and_restart_from_another_shell(start: Callable[..., Running], tmp_path: Path) -> None:
    running = start(role("coordinator", SLEEP, "coordinator"), role("generator-0", SLEEP))
    first = running.wait_for("generator-0", "running")["pids"][0]
    request(tmp_path, {"command": "scale", "role": "generator", "count": 3})
    running.wait_for("generator-2", "running")
    request(tmp_path, {"command": "scale", "role": "generator", "count": 1})
    running.wait_for("generator-2", "stopped")
    running.wait_for("generator-1", "stopped")
    request(tmp_path, {"command": "restart", "name": "generator-0"})
    eventually(lambda: running.role("generator-0")["pids"] not in ([], [first]), "the restart")
    request(tmp_path, {"command": "scale", "role": "generator", "count": 2})
    running.wait_for("generator-1", "running")
    assert running.role("coordinator")["num_restarts"] == 0
    with pytest.raises(UserError, match="no role named 'nope'"):
        request(tmp_path, {"command": "restart", "name": "nope"})
    with pytest.raises(UserError, match="cannot be scaled"):
        request(tmp_path, {"command": "scale", "role": "trainer", "count": 2})


def test_ranks_live_and_die_together(start: Callable[..., Running]) -> None:
    running = start(role("trainer", SLEEP, "trainer", num_ranks=2))
    pids = running.wait_for("trainer", "running")["pids"]
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: (r := running.role("trainer"))["num_restarts"] == 1 and len(r["pids"]) == 2, "the restart")
    assert not set(running.role("trainer")["pids"]) & set(pids)
    assert not psutil.pid_exists(pids[0])


def test_roles_end_when_the_supervisor_is_killed(start: Callable[..., Running]) -> None:
    running = start(role("a", SLEEP))
    pid = running.wait_for("a", "running")["pids"][0]
    child = psutil.Process(pid)
    running.process.kill()
    running.process.wait(DEADLINE_S)
    eventually(lambda: not child.is_running(), "the role's end")
    assert not child.is_running()


def test_a_new_supervisor_kills_what_a_dead_one_left(start: Callable[..., Running], tmp_path: Path) -> None:
    running = start(role("a", STUBBORN))
    pid = running.wait_for("a", "running")["pids"][0]
    eventually(lambda: tail(tmp_path / "logs" / "a.log", num_lines=1), "a ready")
    running.process.kill()
    running.process.wait(DEADLINE_S)
    assert psutil.pid_exists(pid)
    left = psutil.Process(pid)
    again = start(role("a", SLEEP))
    eventually(lambda: again.role("a")["pids"] not in ([], [pid]), "the new start")
    eventually(lambda: not left.is_running(), "the end of what was left")


def test_the_rest_is_stopped_once_coordinator_and_trainer_finished(start: Callable[..., Running]) -> None:
    running = start(
        role("coordinator", "pass", "coordinator"),
        role("trainer", "pass", "trainer"),
        role("g", SLEEP),
        stop_grace_s=0.3,
    )
    assert running.process.wait(DEADLINE_S) == 0
    assert running.role("g")["state"] == "stopped"


def test_back_off_grows_to_its_limit(tmp_path: Path) -> None:
    from deploy.local.instance import Instance

    spec = RoleSpec(role="generator", name="a", command=(sys.executable, "-c", "raise SystemExit(1)"))
    instance = Instance(spec, DeploySection(backoff_s=1.0, max_backoff_s=3.0), tmp_path)
    now, delays = 0.0, []
    for _ in range(4):
        now = instance.ready_at
        instance.check(now)
        instance.processes[0].wait(DEADLINE_S)
        instance.check(now)
        delays.append(instance.ready_at - now)
    assert delays == [1.0, 2.0, 3.0, 3.0]


def test_no_supervisor_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no supervisor runs for"):
        request(tmp_path, {"command": "stop"})


def test_logs_are_bounded_and_keep_taking_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("ab", buffering=0) as writer:
        for index in range(6):
            writer.write(f"{index}".encode() * 100 + b"\n")
            assert rotate_if_large(path, max_bytes=100)
        writer.write(b"last\n")
    assert path.read_bytes() == b"last\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.log", "a.log.1", "a.log.2", "a.log.3"]
    assert tail(tmp_path / "a.log.1", num_lines=1) == ["5" * 100]
    assert not rotate_if_large(path, max_bytes=100)


def test_supervisor_of_nothing_ends_at_once(tmp_path: Path) -> None:
    assert Supervisor(tmp_path, [], settings=DeploySection()).run() == 0
