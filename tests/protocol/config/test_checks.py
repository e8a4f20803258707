"""Cross-role checks: each names the settings, the numbers and a value that fits."""

import re
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from protocol.auth import generate_keys
from protocol.config.checks import check_config, raise_on_errors
from protocol.config.dead_knobs import RULES
from protocol.config.keys import leaf_fields
from protocol.config.load import build_config, load_config, save_effective
from protocol.config.machine import check_machine, port_holder
from protocol.errors import UserError

MINIMAL = {"model": {"path": "m"}, "data": {"train_files": ["t.parquet"]}}


def errors(*overrides: str, values: dict | None = None) -> list[str]:
    loaded = build_config({**MINIMAL, **(values or {})}, overrides=overrides)
    return [f"{f.key}: {f.message}" for f in check_config(loaded) if f.level == "error"]


def test_the_defaults_pass() -> None:
    assert errors() == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["learner.mini_batches=3"], r"learner\.mini_batches: 3 .*groups_per_batch = 8: use mini_batches = (2|4), or"),
        (["trainer.num_ranks=3", "learner.sequence_parallel=2"], r"not divide the trainer's 3 ranks .*: use .* 4"),
        (["trainer.num_ranks=65"], r"65 data-parallel ranks share mini-batches of 64 answers"),
        (["learner.max_tokens_per_micro_batch=1000"], r"longest sequence of 2048 tokens .*use at least 2048"),
        (["learner.group_size=1"], r"learner\.group_size: 1 with algorithm\.advantage = grpo"),
        (["sampling.top_p=0.9"], r"sampling\.top_p: 0\.9 .*use 1\.0"),
        (["sampling.top_k=20"], r"sampling\.top_k: 20 .*use -1"),
        (["sampling.min_p=0.1"], r"sampling\.min_p: 0\.1 .*use 0\.0"),
        (["sampling.min_response_tokens=20"], r"sampling\.min_response_tokens: 20 changes the distribution .*: use 0"),
        (["sampling.temperature=2.5"], r"sampling\.temperature: 2\.5 makes answers noise: use at most 2"),
        (["trainer.num_nodes=2", "trainer.master_addr=10.0.0.7"], r"trainer\.master_port: 0 with trainer\.num_nodes"),
        (["trainer.num_nodes=2", "trainer.master_port=29500"], r"trainer\.master_addr: 127\.0\.0\.1 reaches only one"),
        (["algorithm.kl.where=loss", "algorithm.kl.coef=0"], r"algorithm\.kl\.coef: 0 .*where = loss"),
        (["algorithm.clip_dual=1.1"], r"clip_dual: 1\.1 must be above 1 \+ clip_high = 1\.2"),
        (["transport.peer_timeout_s=1"], r"peer_timeout_s: 1 is too short .*use at least 2"),
        (["generators.drain_s=90"], r"90 s of draining .*use at most 60"),
        (["trainer.devices=[0,1]"], r"names 2 devices for trainer\.num_ranks = 1"),
        (["generators.devices=[1]", "generators.num=2"], r"names 1 devices, 2 are needed"),
        (["generators.backend=openai"], r"openai_url: needed"),
        (["stages=[{from_update: 5}, {from_update: 5}]"], r"stages: from_update values \[5, 5\]"),
        (["stages=[{from_update: 0, max_response_tokens: 9000}]"], r"longest sequence of 10024 tokens"),
    ],
)
def test_b73_numbers_that_do_not_fit_are_refused_with_a_value_that_would(overrides: list[str], message: str) -> None:
    found = errors(*overrides)
    assert any(re.search(message, line) for line in found), found


def test_b11_asynchronous_training_without_correction_is_refused() -> None:
    found = errors("algorithm.behaviour.level=off")
    assert any("without correction" in line and "max_staleness = 1" in line for line in found)
    assert errors("algorithm.behaviour.level=off", "algorithm.max_staleness=0") == []
    assert errors("algorithm.behaviour.level=off", "algorithm.loss=ppo_clip") == []


def test_b74_a_setting_without_effect_is_an_error_with_the_reason() -> None:
    found = errors("algorithm.kl.coef=0.01")
    assert found == [
        "algorithm.kl.coef: 0.01 (set in command line) has no effect with algorithm.kl.where = off: "
        "remove it or change the mode"
    ]
    assert errors("algorithm.kl.coef=0.01", "algorithm.kl.where=loss") == []
    assert any("critic" in line for line in errors("learner.critic.lr=1e-3"))


def test_dead_knob_rules_name_real_settings() -> None:
    assert {key for keys, _, _ in RULES for key in keys} <= {key for key, _ in leaf_fields()}


def test_a_saved_run_configuration_has_no_dead_knobs_of_its_own(tmp_path: Path) -> None:
    loaded = build_config(MINIMAL, overrides=["algorithm.loss=ppo_clip"])
    assert check_config(load_config(save_effective(loaded, tmp_path))) == []


def test_b36_addresses_that_others_cannot_use_are_refused_by_name(tmp_path: Path) -> None:
    assert any(
        line.startswith("coordinator.listen:") and "curve_dir" in line
        for line in errors("coordinator.listen=tcp://10.0.0.1:1")
    )
    keys = tmp_path / "keys"
    generate_keys(keys)
    safe = [f"transport.curve_dir={keys}", "coordinator.listen=tcp://0.0.0.0:5600"]
    assert any(line.startswith("coordinator.advertise: needed") for line in errors(*safe))
    for bad in ("tcp://0.0.0.0:5600", "tcp://localhost:5600"):
        assert any(line.startswith("coordinator.advertise:") for line in errors(*safe, f"coordinator.advertise={bad}"))
    assert errors(*safe, "coordinator.advertise=tcp://10.0.0.1:5600") == []
    assert any("store_host" in line for line in errors(*safe[:1], "weights.listen=tcp://10.0.0.1:0"))
    assert any("no server.key" in line for line in errors(f"transport.curve_dir={tmp_path / 'empty'}"))


def test_all_errors_come_in_one_message() -> None:
    loaded = build_config(MINIMAL, overrides=["sampling.top_p=0.9", "learner.mini_batches=3"])
    with pytest.raises(UserError, match=r"(?s)mini_batches.*top_p|top_p.*mini_batches"):
        raise_on_errors(check_config(loaded))


# ---------------------------------------------------------------- the machine


@pytest.fixture
def fitting(tmp_path: Path) -> dict:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 4096, "num_attention_heads": 9}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"0" * 100)
    rows = [{"data_source": "a", "prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "1"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    return {
        "model": {"path": str(model)},
        "data": {"train_files": [str(tmp_path / "train.parquet")]},
        "run": {"dir": str(tmp_path / "run")},
        "coordinator": {"listen": "tcp://127.0.0.1:0"},
        "deploy": {"min_free_gb": 0},
        "learner": {"checkpoint": {"min_free_gb": 0}},
    }


def machine_errors(values: dict, *overrides: str) -> list[str]:
    found = check_machine(build_config(values, overrides=overrides).config)
    return [f"{f.key}: {f.message}" for f in found if f.level == "error"]


def test_a_fitting_machine_passes(fitting: dict) -> None:
    assert machine_errors(fitting) == []


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_model_folder_lacking_a_part_is_refused(fitting: dict, missing: str) -> None:
    (Path(fitting["model"]["path"]) / missing).unlink()
    assert len(machine_errors(fitting)) == 1
    assert machine_errors(fitting)[0].startswith("model.path:")


def test_lengths_beyond_the_model_are_refused(fitting: dict) -> None:
    assert any("4096 positions" in line for line in machine_errors(fitting, "sampling.max_response_tokens=4000"))
    assert any("9 attention heads" in line for line in machine_errors(fitting, "generators.tensor_parallel_size=2"))


def test_data_files_are_looked_at(fitting: dict, tmp_path: Path) -> None:
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"no parquet")
    pq.write_table(pa.table({"question": ["q"]}), tmp_path / "columns.parquet")
    (tmp_path / "bad.jsonl").write_text("{nope\n")
    for name, message in (
        ("absent.parquet", "does not exist"),
        ("bad.parquet", "not readable as parquet"),
        ("columns.parquet", "lacks the columns data_source, prompt, reward_model"),
        ("bad.jsonl", "is not JSON lines"),
    ):
        assert any(message in line for line in machine_errors(fitting, f"data.eval_files=[{tmp_path / name}]"))


def test_b58_a_taken_port_names_its_holder(fitting: dict) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = machine_errors(fitting, f"coordinator.listen=tcp://127.0.0.1:{port}")
        assert any(f"port {port} is taken by pid" in line and "choose another" in line for line in found)
    assert port_holder(port) is None


def test_a_run_folder_that_cannot_be_made_is_refused(fitting: dict, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert any("is a file" in line for line in machine_errors(fitting, f"run.dir={tmp_path}/file/run"))
    assert any("GB free" in line for line in machine_errors(fitting, "deploy.min_free_gb=1e9"))


def test_a_model_too_large_for_the_memory_is_refused(fitting: dict) -> None:
    weights = Path(fitting["model"]["path"]) / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(4 * 10**12)
    assert any("GB of memory" in line for line in machine_errors(fitting, "trainer.device=cpu"))
