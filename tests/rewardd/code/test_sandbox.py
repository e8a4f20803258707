"""Levels of isolation, faults of our own, and what is left afterwards."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import psutil
import pytest

import rewardd
from rewardd.code import CodeResult, IsolationUnavailable, Limits, Sandbox, run_case

ECHO = {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "2\n"]}
ADD = {"assert_case": ["assert add(1, 2) == 3"]}
SYSTEM_PYTHON = "/usr/bin/python3"
LIMITS = Limits(time_limit_s=3.0, memory_mb=256)


def run_echo(sandbox: Sandbox, program: str = "print(input())") -> CodeResult:
    return run_case(sandbox, kind="stdin", response=None, program=program, tests=ECHO, limits=LIMITS)


@pytest.fixture(params=["seccomp", "rlimits"])
def weaker(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox of a level below namespaces, with an interpreter that other users can read."""
    if os.geteuid() != 0:
        pytest.skip("levels below namespaces need root")
    if not os.path.exists(SYSTEM_PYTHON):
        pytest.skip(f"needs an interpreter that every user can read, {SYSTEM_PYTHON}")
    level: Literal["seccomp", "rlimits"] = request.param
    with Sandbox(level, interpreter=SYSTEM_PYTHON, packages=()) as made:
        yield made


def test_every_reply_names_the_tier(sandbox: Sandbox) -> None:
    assert sandbox.tier.startswith("namespaces+seccomp")
    assert run_echo(sandbox).tier == sandbox.tier
    assert run_case(sandbox, kind="stdin", response="no code", tests=ECHO).tier == sandbox.tier


def test_probe_reports_what_the_self_test_could_do(sandbox: Sandbox) -> None:
    could = sandbox.probe()["could"]
    assert could["child"] and could["own_file"]
    assert not any(could[name] for name in ("network", "host_file", "host_process", "write_outside", "mount", "root"))


def test_weaker_level_works_and_names_itself(weaker: Sandbox) -> None:
    assert "namespaces" not in weaker.tier
    assert run_echo(weaker).verdict == "correct"
    assert run_case(weaker, kind="assert", response=None, program="def add(a, b): return a + b", tests=ADD).passed
    assert not run_case(weaker, kind="assert", response=None, program="import os\nos._exit(0)", tests=ADD).passed


def test_weaker_level_leaves_no_process_and_no_file(weaker: Sandbox) -> None:
    program = """
import os, time
print(input(), *os.listdir('.'))
open('left', 'w').write('x')
os.symlink('/tmp', 'link')
os.makedirs('a/b/c')
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
"""
    tests = {"inputs": ["1\n"] * 3, "outputs": ["1 main.py\n"] * 3}
    assert run_case(weaker, kind="stdin", response=None, program=program, tests=tests, limits=LIMITS).passed
    assert [
        child for pid in weaker.probe()["slot_pids"] for child in psutil.Process(pid).children(recursive=True)
    ] == []


def test_b25_folders_nested_beyond_every_limit_are_removed(weaker: Sandbox) -> None:
    program = """
import os
assert os.listdir('.') == ['main.py']
for _ in range(1500):
    os.mkdir('d')
    os.chdir('d')
os.chmod('.', 0)
print(input())
"""
    result = run_case(weaker, kind="stdin", response=None, program=program, tests=ECHO, limits=Limits(time_limit_s=30))
    assert result.verdict == "correct", result
    assert weaker.num_restarts == 0


def test_two_sandboxes_do_not_kill_each_others_programs(weaker: Sandbox) -> None:
    with Sandbox("rlimits", interpreter=SYSTEM_PYTHON, packages=()) as other, ThreadPoolExecutor(2) as pool:
        slow = pool.submit(run_echo, other, "import time\ntime.sleep(0.8)\nprint(input())")
        while not slow.done():
            assert run_echo(weaker).passed
        assert slow.result().passed
        assert other.num_restarts == 0


def test_weaker_level_kills_what_hangs(weaker: Sandbox) -> None:
    program = "import os\nfor _ in range(5): os.fork()\nwhile True: pass"
    result = run_case(
        weaker,
        kind="stdin",
        response=None,
        program=program,
        tests=ECHO,
        limits=Limits(time_limit_s=1.0, memory_mb=256),
        early_exit=True,
    )
    assert result.reason == "timeout"
    assert run_echo(weaker).passed


def test_seccomp_level_has_no_network_and_no_host_files(weaker: Sandbox) -> None:
    could = weaker.probe()["could"]
    if weaker.level == "seccomp":
        assert not could["network"] and not could["write_outside"]
    assert not could["host_file"] and not could["host_memory"] and not could["root"]


def test_rlimits_alone_are_never_chosen_automatically() -> None:
    # An interpreter that no fork server can run on makes every level fail.
    with pytest.raises(IsolationUnavailable, match=r"namespaces: .*seccomp: "):
        Sandbox("auto", interpreter="/bin/false")


def test_unknown_level_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="docker"):
        Sandbox("docker")  # type: ignore[arg-type]


def test_unprivileged_user_gets_namespaces_or_a_refusal(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not os.path.exists(SYSTEM_PYTHON):
        pytest.skip(f"needs root to become another user, and {SYSTEM_PYTHON}")
    # A copy that the other user can read, wherever this checkout lies.
    shutil.copytree(Path(rewardd.__file__).parent / "code", tmp_path / "rewardd" / "code")
    (tmp_path / "rewardd" / "__init__.py").touch()
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.owner() == "root" and folder.is_relative_to("/tmp/pytest-of-root"):
            folder.chmod(0o755)
    script = """
from rewardd.code import *
try:
    with Sandbox() as sandbox:
        result = run_case(sandbox, kind="stdin", response=None, program="import os; print(os.getuid())",
                          tests={"inputs": [""], "outputs": ["1000"]})
        asserted = run_case(sandbox, kind="assert", response=None, program="def f(): return 1",
                            tests={"assert_case": ["assert f() == 1"]})
        print(sandbox.tier, result.verdict, asserted.verdict)
except IsolationUnavailable as fault:
    print("refused:", fault)
"""
    run = subprocess.run(
        [SYSTEM_PYTHON, "-B", "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.stdout.startswith(("namespaces+seccomp", "refused:")), run.stderr
    if run.stdout.startswith("namespaces"):
        assert run.stdout.split()[1:] == ["correct", "correct"]


def kill_servers(sandbox: Sandbox) -> None:
    for pid in sandbox.probe()["slot_pids"]:
        os.kill(pid, signal.SIGKILL)


def test_dead_fork_server_is_replaced() -> None:
    with Sandbox(packages=()) as sandbox:
        kill_servers(sandbox)
        assert run_echo(sandbox).verdict == "correct"
        assert sandbox.num_restarts == 1


def test_fork_server_killed_in_mid_run_is_retried() -> None:
    with Sandbox(packages=()) as sandbox:
        killer = threading.Timer(0.5, kill_servers, [sandbox])
        killer.start()
        result = run_echo(sandbox, "import time\ntime.sleep(0.8)\nprint(input())")
        killer.join()
        assert result.verdict == "correct"
        assert sandbox.num_restarts == 1


def test_sandbox_that_keeps_failing_leaves_the_program_unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox(packages=()) as sandbox:
        # From now on a fork server cannot even be started.
        for slot in sandbox._slots:
            monkeypatch.setattr(slot, "_interpreter", "/nonexistent/python")
        kill_servers(sandbox)
        result = run_echo(sandbox)
        assert (result.verdict, result.reason, result.passed) == ("unjudged", "infra_error", False)
        monkeypatch.undo()
        assert run_echo(sandbox).verdict == "correct"


def test_running_out_of_descriptors_is_not_the_programs_fault() -> None:
    code = """
import resource, os
from rewardd.code import Sandbox, run_case
with Sandbox(packages=()) as sandbox:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True: held.append(os.dup(0))
    except OSError: pass
    task = dict(kind="stdin", response=None, program="print(1)", tests={"inputs": [""], "outputs": ["1"]})
    result = run_case(sandbox, **task)
    for handle in held: os.close(handle)
    again = run_case(sandbox, **task)
    print(result.verdict, again.verdict)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(rewardd.__file__).parent.parent)},
    )
    assert run.stdout.split() == ["unjudged", "correct"], run.stderr


def test_slots_run_side_by_side() -> None:
    with Sandbox(num_slots=3, packages=()) as sandbox, ThreadPoolExecutor(6) as pool:
        programs = [f"print(int(input()) + {n} - {n})" for n in range(24)]
        results = list(pool.map(lambda program: run_echo(sandbox, program), programs))
    assert all(result.passed for result in results)


def test_b25_hundreds_of_runs_leave_nothing_behind(sandbox: Sandbox) -> None:
    program = """
import os
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        while True: pass
print(input())
"""
    before = psutil.Process().num_fds()
    for _ in range(60):
        assert run_echo(sandbox, program).passed
    assert psutil.Process().num_fds() <= before
    for pid in sandbox.probe()["slot_pids"]:
        assert psutil.Process(pid).children(recursive=True) == []
        assert psutil.Process(pid).num_fds() < 20


def test_closing_ends_the_fork_servers() -> None:
    sandbox = Sandbox(num_slots=2, packages=())
    pids = sandbox.probe()["slot_pids"]
    sandbox.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_numpy_is_there_when_it_is_installed(sandbox: Sandbox) -> None:
    pytest.importorskip("numpy")
    result = run_echo(sandbox, "import numpy as np\nprint(np.array([int(input())]).sum())")
    assert result.verdict == "correct"


def test_no_control_group_outlives_its_fork_server() -> None:
    def groups() -> set[Path]:
        return set(Path("/sys/fs/cgroup").rglob(f"slipstream-code-{os.getpid()}-*"))

    before = groups()
    with Sandbox(packages=()) as sandbox:
        if "cgroup" not in sandbox.tier:
            pytest.skip(f"no control groups on tier {sandbox.tier}")
        for _ in range(3):
            killer = threading.Timer(0.3, kill_servers, [sandbox])
            killer.start()
            assert (
                run_echo(sandbox, "import os, time\nos.fork()\ntime.sleep(0.5)\nprint(input())").verdict != "unjudged"
            )
            killer.join()
        during = groups() - before
    assert {path.name for path in during} and len({path.name for path in during}) == 1
    assert groups() == before
