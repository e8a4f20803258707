"""The report of a real coordinator's run folder, and the operators' commands on it while it runs and afterwards."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pyarrow.parquet as pq
import pytest

from deploy.cli import run
from deploy.demo.live import line, panel
from protocol.config.load import build_config, save_effective
from protocol.config.machine import free_port
from protocol.errors import ExitStatus
from protocol.messages import CheckpointCommitted, StatusReply
from tests.learner.coordinator.harness import make_config, rows
from tests.learner.coordinator.test_process import Script

DEADLINE_S = 60.0


@dataclass
class Run:
    folder: Path
    process: subprocess.Popen[bytes]
    script: Script


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows(20)))
    (tmp_path / "eval.jsonl").write_text("\n".join(json.dumps(row) for row in rows(4, source="held", start=100)))
    port = free_port()
    overrides = {
        "coordinator.listen": f"tcp://127.0.0.1:{port}",
        "coordinator.journal_keep_all": True,
        "data.eval_files": [str(tmp_path / "eval.jsonl")],
        "evaluation.at_start": True,
        "evaluation.at_end": True,
        "run.max_updates": 6,
        "learner.checkpoint.keep": 1,
        "learner.max_tokens_per_micro_batch": 8192,
        "sinks.names": ["tensorboard", "stuck"],
        "sinks.close_s": 0.5,
    }
    make_stuck_sink(tmp_path / "packages")
    config = make_config(tmp_path, **overrides)
    folder = Path(config.run.dir)
    path = save_effective(build_config(config.model_dump(mode="json")), folder)
    log = (tmp_path / "coordinator.log").open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy", "coordinator", "--config", str(path), "--name", "coordinator"],
        stderr=log,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path_with(tmp_path / "packages")},
    )
    script = Script(config, f"tcp://127.0.0.1:{port}")
    try:
        yield Run(folder, process, script)
    finally:
        script.close()
        process.kill()
        process.wait()
        log.close()


def make_stuck_sink(folder: Path) -> None:
    """An installed package whose metric sink never returns."""
    (folder / "stuck-1.dist-info").mkdir(parents=True)
    (folder / "stuck-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stuck\nVersion: 1\n")
    (folder / "stuck-1.dist-info" / "entry_points.txt").write_text("[slipstream.metric_sinks]\nstuck = stuck:Stuck\n")
    (folder / "stuck.py").write_text("import threading\n\n\ndef Stuck(context):\n    threading.Event().wait()\n")


def path_with(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def status_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    deadline = monotonic() + DEADLINE_S
    while run(["status", "--run-dir", str(folder), "--json"]) != 0:
        capsys.readouterr()
        assert monotonic() < deadline
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_status_ledger_and_report_of_a_run(running: Run, capsys: pytest.CaptureFixture[str]) -> None:
    status = status_of(running.folder, capsys)
    assert status["coordinator"]["run_name"] == "run" and status["supervisor"] is None
    running.script.start()
    assert running.script.finished.wait(DEADLINE_S)
    running.script.ask("trainer", CheckpointCommitted(batch_id=6, policy_version=6, path="step_00000006"))
    running.script.close()
    assert running.process.wait(DEADLINE_S) == ExitStatus.FINISHED

    assert run(["ledger", str(running.folder), "--json"]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert ledger["balanced"] and ledger["trained"] == 24
    assert run(["status", "--run-dir", str(running.folder)]) == ExitStatus.LOST_DEPENDENCY
    assert "coordinator does not answer" in capsys.readouterr().out

    assert run(["plot", str(running.folder)]) == 0
    report = running.folder / "report"
    out = capsys.readouterr().out
    assert "greedy" in out and str(report / "report.html") in out
    summary = json.loads((report / "summary.json").read_text())
    assert summary["num_updates"] == 6 and summary["policy_version"] == 6
    assert {row["kind"] for row in summary["evaluation"]} == {"greedy", "avg@4"}
    page = (report / "report.html").read_text()
    assert summary["advice"] and summary["advice"][0]["text"] in page and "advice   " in out
    assert page.count("data:image/png;base64,") >= 3 and "in standard errors" in page
    table = pq.read_table(report / "trajectories.parquet")
    assert table.num_rows == summary["num_trajectories"] == 24
    row = table.to_pylist()[0]
    assert len(row["token_ids"]) == row["num_prompt_tokens"] + row["num_response_tokens"]
    assert len(row["logp_behaviour"]) == len(row["versions"]) == row["num_response_tokens"]
    assert list((report / "tensorboard").glob("events.out.tfevents.*"))
    assert list((running.folder / "tensorboard").glob("events.out.tfevents.*")), "written while the run went on"
    log = (running.folder.parent / "coordinator.log").read_text()
    assert log.count("metric sink left behind") == 1 and "sink=stuck" in log
    assert [json.loads(r)["batch_id"] for r in (report / "metrics.jsonl").read_text().splitlines()] == list(range(1, 7))


def reply(**changes: object) -> StatusReply:
    values: dict = {
        "run_id": "r",
        "run_name": "demo",
        "run_state": "running",
        "policy_version": 2,
        "published_version": 2,
        "num_updates": 2,
        "max_updates": 3,
        "roles": [],
        "queues": {},
        "staleness_histogram": {"0": 30, "1": 10},
        "metrics": {"rollout/reward_mean": 0.25, "generated_tokens_per_s": 400.0, "idle/trainer": 0.1},
        "ledger": {},
        "series": {"rollout/reward_mean": [0.1, 0.25]},
    }
    return StatusReply(**{**values, **changes})


def test_the_live_view_shows_progress_reward_staleness_rates_and_restarts() -> None:
    from rich.console import Console

    supervisor = {
        "roles": [
            {"name": "generator-0", "state": "running", "pids": [1], "since": 0.0, "num_restarts": 1, "last_exit": -9}
        ]
    }
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(panel(reply(), supervisor, elapsed_s=65.0))
    text = console.export_text()
    for part in ("update 2/3", "0.250", "0: 75 %", "1: 25 %", "400 tokens/s", "learner 10 %", "killed by SIGKILL"):
        assert part in text, part
    plain = line(reply(), supervisor, elapsed_s=65.0)
    assert "update 2/3" in plain and "reward 0.250" in plain and "generator-0 restarted 1 times" in plain
    assert "starting" in line(None, None, elapsed_s=1.0)


def test_a_folder_without_a_run_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plot", str(tmp_path)]) == ExitStatus.CONFIG
    assert "no run folder" in capsys.readouterr().err
    assert run(["ledger", str(tmp_path)]) == ExitStatus.CONFIG
