"""A generator's process with a real engine: deaths of its parts, and of itself."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from protocol.errors import ExitStatus
from tests.generators.support import FakeRun, make_config, make_lease
from tests.support.tiny_model import build_tiny_model
from tests.support.wait import wait_until

pytestmark = pytest.mark.engine


@pytest.fixture
def generator(fake_run: FakeRun, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    model = build_tiny_model(tmp_path / "model")
    config = make_config(str(model), run_dir=str(tmp_path), coordinator=fake_run.address)
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.generators.main_process", config.model_dump_json(), "g0"]
        started.append(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}))
        wait_until(lambda: fake_run.trajectories, deadline_s=150.0, what="the first answer")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def engine_processes(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    return [
        p for p in psutil.Process(process.pid).children(recursive=True) if "resource_tracker" not in str(p.cmdline())
    ]


def test_b13_dead_worker_ends_the_generator_within_seconds(
    fake_run: FakeRun, generator: Callable[[], "subprocess.Popen[bytes]"]
) -> None:
    fake_run.leases = [(make_lease(1, max_tokens=4), {})]
    process = generator()
    children = engine_processes(process)
    fake_run.leases = [(make_lease(2, max_tokens=250, stop_token_ids=()), {})]
    children[-1].kill()
    assert process.wait(30.0) == ExitStatus.ENGINE_FAILED
    wait_until(lambda: not any(child.is_running() for child in children), what="the end of all children")


def test_b15_no_engine_process_survives_a_killed_generator(
    fake_run: FakeRun, generator: Callable[[], "subprocess.Popen[bytes]"]
) -> None:
    fake_run.leases = [(make_lease(1, max_tokens=4), {})]
    process = generator()
    children = engine_processes(process)
    assert len(children) >= 1
    process.send_signal(signal.SIGKILL)
    process.wait(10.0)
    wait_until(
        lambda: not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children),
        deadline_s=10.0,
        what="the end of all children",
    )
