"""Supervised warm start on the tiny model: the assistant's tokens only, losses fall, resume is exact, export loads."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from learner.data.tokenization import PromptTokenizer
from learner.sft.conversations import batch_rows, load_conversations
from protocol.errors import UserError
from tests.support.tiny_model import build_tiny_model, build_tiny_tokenizer

ROWS = [
    [
        {"role": "user", "content": f"{a} plus {b}"},
        {"role": "assistant", "content": f"It is {a + b}"},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": "ok"},
    ]
    for a in range(3)
    for b in range(3)
]


def write_parquet(path, rows=ROWS):
    pq.write_table(pa.table({"messages": rows, "note": ["x"] * len(rows)}), path)
    return str(path)


def test_the_mask_holds_answers_and_their_stop_tokens_and_nothing_else(tmp_path):
    build_tiny_tokenizer(tmp_path)
    rows = load_conversations(
        [write_parquet(tmp_path / "data.parquet")], tokenizer=PromptTokenizer(tmp_path), max_tokens=500
    ).rows
    own = [int(token) for token, is_own in zip(rows[0].token_ids, rows[0].own, strict=True) if is_own]
    first, second = PromptTokenizer(tmp_path).encode(["It is 0", "ok"])
    assert own == [*first, 258, *second, 258]


def test_rows_that_cannot_be_trained_are_left_out_with_the_reason(tmp_path):
    build_tiny_tokenizer(tmp_path)
    rows = [ROWS[0][:1], [{"role": "user", "content": "x" * 600}, {"role": "assistant", "content": "y"}], ROWS[0]]
    found = load_conversations(
        [write_parquet(tmp_path / "data.parquet", rows)], tokenizer=PromptTokenizer(tmp_path), max_tokens=500
    )
    assert len(found.rows) == 1 and len(found.left_out) == 2
    assert "row 1: no turn is the assistant's" in found.left_out[0] and "a micro-batch holds 500" in found.left_out[1]
    with pytest.raises(UserError, match="no conversation"):
        load_conversations(
            [write_parquet(tmp_path / "data.parquet", rows[:1])], tokenizer=PromptTokenizer(tmp_path), max_tokens=500
        )


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own():
    epochs = [
        [row for step in range(3) for row in batch_rows(3 * e + step, num_rows=8, batch_size=3, seed=1)] for e in (0, 1)
    ]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs) and epochs[0] != epochs[1]


@pytest.mark.engine
@pytest.mark.slow
def test_the_command_trains_resumes_exactly_and_exports_a_model(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = build_tiny_model(tmp_path / "model")
    files = [write_parquet(tmp_path / "data.parquet")]

    def train(name, *overrides):
        tree = {
            "run": {"dir": str(tmp_path / name)},
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train_files": ["none.jsonl"]},
            "sft": {"files": files, "epochs": 4, "sequences_per_batch": 4, "optim": {"lr": 3e-3}},
            "learner": {"max_tokens_per_micro_batch": 256, "checkpoint": {"every_updates": 3, "min_free_gb": 0.0}},
            "trainer": {"device": "cpu", "threads_per_rank": 1},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree))
        done = subprocess.run(
            [sys.executable, "-m", "deploy", "sft", "--config", str(path), *overrides],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return [json.loads(line) for line in (tmp_path / name / "sft" / "metrics.jsonl").read_text().splitlines()]

    straight = train("straight")
    assert len(straight) == 12 and straight[-1]["sft/loss"] < 0.7 * straight[0]["sft/loss"]
    train("resumed", "sft.epochs=2")
    resumed = train("resumed")
    assert [r["step"] for r in resumed] == list(range(1, 13))
    assert [r["sft/loss"] for r in resumed] == [r["sft/loss"] for r in straight]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "straight" / "sft" / "export")
    assert exported.config.vocab_size == 320
