"""The command line: exit statuses, one clear line per mistake, no heavy imports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli import run
from deploy.commands import doctor
from deploy.local.control import running_state
from deploy.local.specs import generator_environment, specs_of, trainer_environment
from deploy.prepare.data import write_parquet
from protocol.config.load import build_config
from protocol.errors import ExitStatus
from tests.support.tiny_model import build_tiny_model

CONFIG = """
run: {{name: t, dir: {dir}/run}}
model: {{path: {dir}/model}}
data: {{train_files: [{dir}/train.jsonl]}}
coordinator: {{listen: "tcp://127.0.0.1:0"}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text("{}")
    row = {"data_source": "s", "prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "1"}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(dir=tmp_path))
    return path


def test_check_says_ready_or_names_every_fault(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--config", str(config)]) == 0
    assert "ready" in capsys.readouterr().out
    wrong = ["check", "--config", str(config), "learner.mini_batches=3", "sampling.top_p=0.5"]
    assert run(wrong) == ExitStatus.CONFIG
    assert "learner.mini_batches" in (out := capsys.readouterr().out) and "sampling.top_p" in out


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["nope"], ExitStatus.USAGE, "nope"),
        (["check"], ExitStatus.USAGE, "config"),
        (["check", "--config", "/nowhere.yaml"], ExitStatus.CONFIG, "cannot read"),
        (["config", "explain", "learner.groupsize"], ExitStatus.CONFIG, "did you mean 'learner.group_size'"),
        (["down", "/nowhere"], ExitStatus.LOST_DEPENDENCY, "no supervisor runs"),
        (["status", "--run-dir", "/nowhere"], ExitStatus.CONFIG, "no run folder"),
        (["data", "make", "nope", "/tmp"], ExitStatus.CONFIG, "no data recipe"),
        (["scale", "generators", "--run-dir", "/nowhere"], ExitStatus.CONFIG, "generators=K"),
    ],
)
def test_a_users_mistake_is_one_line_and_its_status(
    arguments: list[str], status: ExitStatus, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == status
    error = capsys.readouterr().err
    assert says in error and error.startswith("slipstream: ") and "Traceback" not in error
    assert len(error.strip().splitlines()) == 1


def test_python_m_deploy_is_the_same_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy", "config", "explain", "sampling.top_p"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "Must be 1 for training" in done.stdout
    done = subprocess.run([sys.executable, "-m", "deploy", "nope"], capture_output=True, text=True)
    assert done.returncode == ExitStatus.USAGE


def test_the_command_line_needs_no_torch() -> None:
    code = "import sys, deploy.cli; sys.exit(bool({'torch', 'vllm', 'deepspeed', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("leaves_a_thread", [True, False])
def test_b54_a_thread_left_in_a_library_does_not_change_the_exit_status(leaves_a_thread: bool) -> None:
    code = (
        "import atexit, threading\nfrom deploy.cli import leave\n"
        "atexit.register(print, 'finalised')\n"
        f"threading.Thread(target=threading.Event().wait, args=(1.0,), daemon={leaves_a_thread}).start()\n"
        "leave(69)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (69, "" if leaves_a_thread else "finalised"), done.stderr


def test_up_refuses_what_cannot_work_and_leaves_nothing_behind(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "--config", str(config), "learner.mini_batches=3"]) == ExitStatus.CONFIG
    assert "learner.mini_batches" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert running_state(tmp_path / "run") is None


def test_data_check_names_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"data_source": "s", "prompt": [{"role": "user", "content": "1+1"}], "reward_model": {"ground_truth": "2"}}
    model = str(build_tiny_model(tmp_path / "model"))
    write_parquet([good, {**good, "reward_model": {"ground_truth": None}}], tmp_path / "d.parquet")
    assert run(["data", "check", str(tmp_path / "d.parquet"), "--tokenizer", model]) == ExitStatus.CONFIG
    assert "1 of 2 rows usable" in (out := capsys.readouterr().out) and "row 2" in out
    write_parquet([good], tmp_path / "good.parquet")
    assert run(["data", "check", str(tmp_path / "good.parquet"), "--tokenizer", model]) == 0


def test_specs_name_every_instance_and_their_devices(tmp_path: Path) -> None:
    values = {"model": {"path": "m"}, "data": {"train_files": ["t"]}}
    overrides = ["generators.num=2", "trainer.num_ranks=2", "generators.device=cuda"]
    config = build_config(values, overrides=overrides).config
    specs = specs_of(config, config_path=tmp_path / "config.yaml", num_devices=4)
    assert [s.name for s in specs] == ["coordinator", "rewardd-0", "trainer", "generator-0", "generator-1"]
    assert [s.num_ranks for s in specs] == [1, 1, 2, 1, 1]
    ranks = trainer_environment(config)
    assert [e["RANK"] for e in ranks] == ["0", "1"] and len({e["MASTER_PORT"] for e in ranks}) == 1
    devices = [generator_environment(config, index=i, num_devices=4)["CUDA_VISIBLE_DEVICES"] for i in range(2)]
    assert devices == ["2", "3"]
    shared = generator_environment(config, index=0, num_devices=1)
    assert shared == {"CUDA_VISIBLE_DEVICES": "0"}
    assert generator_environment(config, index=0, num_devices=0) == {}


def test_the_doctor_names_a_fix_for_each_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "pyarrow" else real(name))
    assert run(["doctor"]) == ExitStatus.FAILED
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("FIX") and "pyarrow" in line)
    assert "not installed" in lines[at] and "pip install pyarrow" in lines[at + 1]
    assert any("sandbox" in line for line in lines) and any("CPU cores" in line for line in lines)


def test_run_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(["data", "make", "arithmetic", str(tmp_path / "file" / "data")]) == ExitStatus.CONFIG
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(tmp_path / "file") in error and "Not a directory" in error
