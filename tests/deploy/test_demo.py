"""The demo's own work (prepare, watch, stop, report) with the real coordinator and stand-in peers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from deploy.demo.recipe import DemoOptions, demo_config, merge
from deploy.demo.run import run_demo
from deploy.local.control import read_state, running_state
from deploy.prepare.model import MODEL_NAME
from protocol.config.checks import check_config
from protocol.errors import ExitStatus, UserError
from tests.support.tiny_model import build_tiny_model
from tests.support.wait import wait_until

pytest.importorskip("reasoning_gym", reason="the demo's data needs reasoning-gym")
DEADLINE_S = 60.0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    build_tiny_model(folder / MODEL_NAME)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(folder))
    return folder


def supervise(mode: str):
    return lambda run_dir: [sys.executable, "-m", "tests.deploy.standins", "supervise", str(run_dir), mode]


OVERRIDES = (
    "sampling.max_response_tokens=64",
    "data.max_prompt_tokens=256",
    "deploy.min_free_gb=0",
    "learner.checkpoint.min_free_gb=0",
)


@pytest.mark.slow
def test_a_short_demo_ends_with_a_whole_report(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = DemoOptions(run_dir=tmp_path / "run", short=True, seed=1, overrides=OVERRIDES)
    assert run_demo(options, console=Console(width=200), supervise=supervise("finish")) == ExitStatus.FINISHED
    out = capsys.readouterr().out
    assert "update 3/3" in out and "greedy" in out and "avg@4" in out and "report.html" in out
    report = options.run_dir / "report"
    summary = json.loads((report / "summary.json").read_text())
    assert summary["num_updates"] == 3 and summary["wall_s"] > 0 and summary["peak_rss_gb"] > 0
    assert summary["ledger"]["balanced"] and summary["num_trajectories"] == 3 * 64
    assert summary["num_restarts"] == {"coordinator": 0, "trainer": 0}
    for name in ("report.html", "metrics.jsonl", "timeline.jsonl", "trajectories.parquet", "tensorboard"):
        assert (report / name).exists(), name
    assert running_state(options.run_dir) is None


@pytest.mark.slow
def test_a_role_that_keeps_failing_ends_the_demo_with_its_last_words(cache: Path, tmp_path: Path) -> None:
    options = DemoOptions(run_dir=tmp_path / "run", short=True, overrides=OVERRIDES)
    with pytest.raises(UserError, match=r"(?s)trainer failed \d+ times \(last exit status 70 .*engine on fire"):
        run_demo(options, console=Console(), supervise=supervise("fail"))
    assert running_state(options.run_dir) is None


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_b57_ctrl_c_stops_everything(cache: Path, tmp_path: Path, number: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    script = (
        "import sys\nfrom pathlib import Path\nfrom rich.console import Console\n"
        "from deploy.demo.recipe import DemoOptions\nfrom deploy.demo.run import run_demo\n"
        "from tests.deploy.test_demo import OVERRIDES, supervise\n"
        f"options = DemoOptions(run_dir=Path({str(run_dir)!r}), short=True, overrides=OVERRIDES)\n"
        "try:\n    run_demo(options, console=Console(), supervise=supervise('hang'))\n"
        "except KeyboardInterrupt:\n    sys.exit(130)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], env=os.environ, start_new_session=True)
    deadline = time.monotonic() + DEADLINE_S
    while not ((state := read_state(run_dir)) and all(r["state"] == "running" for r in state["roles"])):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    pids = [state["pid"], *(pid for role in state["roles"] for pid in role["pids"])]
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == 130
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), deadline_s=DEADLINE_S, what=f"the end of {pids}")
    assert running_state(run_dir) is None


def test_the_recipes_pass_the_checks(tmp_path: Path) -> None:
    paths = {"model": tmp_path / "m", "train": tmp_path / "t.parquet", "held_out": tmp_path / "e.parquet"}
    for on_gpu in (False, True):
        for short in (False, True):
            options = DemoOptions(run_dir=tmp_path, short=short)
            loaded = demo_config(options, **paths, on_gpu=on_gpu)
            assert check_config(loaded) == []
            assert loaded.config.algorithm.max_staleness == 1
            assert loaded.config.generators.device == ("cuda" if on_gpu else "auto")
            assert (loaded.config.run.max_updates == 3) == short


def test_merge_is_deep_and_the_second_wins() -> None:
    assert merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 9}, "d": {"e": 1}}) == {
        "a": {"b": 9, "c": 2},
        "d": {"e": 1},
    }
