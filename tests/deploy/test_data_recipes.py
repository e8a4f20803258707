"""Procedural data: columns, answers, disjoint splits."""

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from deploy.prepare.data import RECIPES, make_data, make_rows
from protocol.errors import UserError

pytest.importorskip("reasoning_gym", reason="procedural data needs reasoning-gym")


def question(row: dict) -> str:
    return row["prompt"][-1]["content"]


@pytest.mark.parametrize("name", list(RECIPES))
def test_answers_are_right_and_prompts_distinct(name: str) -> None:
    rows = make_rows(RECIPES[name], split="train", num_rows=100, seed=1)
    assert len({question(row) for row in rows}) == 100
    for row in rows:
        words = re.sub(r"[?.]", " ", question(row)).split()
        at = next(i for i, word in enumerate(words) if word in "+-*")
        left, right = int(words[at - 1]), int(words[at + 1])
        assert row["reward_model"]["ground_truth"] == str(
            {"+": left + right, "-": left - right, "*": left * right}[words[at]]
        )


def test_splits_share_no_prompt_whatever_the_seeds(tmp_path: Path) -> None:
    train, held_out = make_data("arithmetic", tmp_path, num_train=512, num_eval=96, seed=3)
    trained = {question(row) for row in pq.read_table(train).to_pylist()}
    evaluated = {question(row) for row in pq.read_table(held_out).to_pylist()}
    assert len(trained) == 512 and len(evaluated) == 96
    other = {question(row) for row in make_rows(RECIPES["arithmetic"], split="eval", num_rows=96, seed=9)}
    assert not trained & (evaluated | other)


def test_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    first, _ = make_data("arithmetic", tmp_path / "a", num_train=64, num_eval=16, seed=5)
    second, _ = make_data("arithmetic", tmp_path / "b", num_train=64, num_eval=16, seed=5)
    assert pq.read_table(first).equals(pq.read_table(second))


def test_too_many_rows_or_an_unknown_name_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"only \d+ distinct train prompts"):
        make_data("arithmetic", tmp_path, num_train=5000, num_eval=10)
    with pytest.raises(UserError, match="arithmetic"):
        make_data("algebra", tmp_path, num_train=5, num_eval=5)
