"""`slipstream plan`: from options, from a run folder, and its refusals."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from deploy.cli import run
from deploy.planning import exponential_lengths
from learner.coordinator.records import Answer
from learner.coordinator.schema import open_database
from protocol.errors import ExitStatus, UserError

MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "tie_word_embeddings": True,
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run of 8 updates: 2 s each, answers of 10 tokens sampled at 5 tokens/s per slot."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    tree = {
        "run": {"dir": str(tmp_path)},
        "model": {"path": str(tmp_path)},
        "data": {"train_files": ["none.parquet"], "max_prompt_tokens": 32},
        "sampling": {"max_response_tokens": 32},
        "learner": {"groups_per_batch": 2, "group_size": 4, "max_tokens_per_micro_batch": 1024},
        "generators": {"max_num_seqs": 8},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    records = [
        {"time": 100.0 + 2.5 * batch, "attempt": 1, "batch_id": batch, "replayed": False, "perf/update_seconds": 2.0}
        for batch in range(1, 9)
    ]
    records += [record | {"attempt": 2, "replayed": True, "perf/update_seconds": 1.0} for record in records]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    answer = Answer(
        num_prompt_tokens=5,
        num_response_tokens=10,
        finish_reason="stop",
        score=1.0,
        verdict="correct",
        version_counts={0: 10},
        temperature=1.0,
        seconds=2.0,
    )
    database = open_database(tmp_path / "coordinator" / "ledger.sqlite")
    for group in range(1, 5):
        database.execute(
            "INSERT INTO groups (group_id, purpose, prompt_id, pass, position, num_slots, stage, variant, state, "
            "created) VALUES (?, 'train', 'p', 0, 0, 4, 0, 'sampled', 'trained', 0.0)",
            (group,),
        )
        for slot in range(4):
            database.execute(
                "INSERT INTO trajectories (group_id, slot, segment, offset, facts) VALUES (?, ?, 0, 0, ?)",
                (group, slot, msgspec.msgpack.encode(answer)),
            )
    database.close()
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_a_run_is_measured_and_its_prediction_shown_beside(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--run-dir", str(run_dir), "--gpu-gb", "80")
    assert found["measured"] == {"seconds_per_update": 2.5, "learner_idle": pytest.approx(0.2), "num_updates": 5}
    assert found["workload"]["mean_tokens"] == 10.0
    assert found["predicted"]["max_staleness"] == 1
    assert 2.0 <= found["predicted"]["seconds_per_update"] < 3.0
    assert f"generators.num={found['recommended']['num_generators']}" in found["recommended"]["overrides"]
    assert found["memory"]["configured"]["fits"]
    assert run(["plan", "--run-dir", str(run_dir), "--gpu-gb", "80"]) == 0
    text = capsys.readouterr().out
    assert "this run   2.50 s per update" in text and "recommended" in text and "GiB" in text


def test_rates_may_be_given_instead(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = ("--tokens-per-s", "30", "--update-s", "2", "--mean-tokens", "10")
    found = planned(capsys, "--config", str(run_dir / "config.yaml"), *rates, "--reward-per-s", "2")
    assert found["workload"]["mean_tokens"] == pytest.approx(10.0, rel=0.05)
    assert found["recommended"]["num_generators"] > 1 and found["recommended"]["num_rewardd"] == 3
    assert "memory" not in found


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--run-dir"),
        (["--config", "{}/config.yaml"], "--tokens-per-s"),
        (["--config", "{}/config.yaml", "--update-s", "2"], "belong together"),
        (["--run-dir", "{}/nowhere"], "no run folder"),
    ],
)
def test_what_is_missing_is_named(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert run(["plan", *(argument.format(run_dir) for argument in arguments)]) != 0
    assert says in capsys.readouterr().err


def test_a_run_too_short_to_measure_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = (run_dir / "metrics.jsonl").read_text().splitlines()[0]
    (run_dir / "metrics.jsonl").write_text(first + "\n")
    assert run(["plan", "--run-dir", str(run_dir)]) == ExitStatus.CONFIG
    assert "1 trained batches" in capsys.readouterr().err


@pytest.mark.parametrize("mean", [3.0, 100.0, 900.0])
def test_exponential_lengths_have_the_mean_that_was_asked_for(mean: float) -> None:
    lengths = exponential_lengths(mean, longest=1024)
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.05)
    assert max(lengths) <= 1024 and min(lengths) >= 1


def test_a_mean_above_the_longest_answer_is_refused() -> None:
    with pytest.raises(UserError, match="must be below"):
        exponential_lengths(2000.0, longest=1024)
