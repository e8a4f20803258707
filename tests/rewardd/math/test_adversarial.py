"""Answers written to fool the verifier: hedges, lists, near misses, other scripts, formulas that agree only nearby."""

import json
from pathlib import Path

import pytest

from rewardd.math import verify

FILE = Path(__file__).parent / "adversarial_cases.jsonl"
CASES = [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]
LONG = {
    "every integer": ("7", " ".join(map(str, range(100)))),
    "every integer boxed": ("7", " ".join(f"\\boxed{{{number}}}" for number in range(8))),
    "every integer boxed in dollars": ("7", ", ".join(f"$\\boxed{{{number}}}$" for number in range(8))),
    "an open box again and again": ("3", "\\boxed{3" * 2000),
    "nested roots": ("3", "\\boxed{" + "\\sqrt{" * 500 + "9" + "}" * 500 + "}"),
    "many digits": ("3", "\\boxed{" + "9" * 100_000 + "}"),
}


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_an_attempt_to_fool_the_verifier(case: dict) -> None:
    result = verify(case["response"], gold=case["gold"])
    assert result.correct is case["expected"], (case, result)


@pytest.mark.parametrize("name", LONG)
def test_saying_everything_is_no_answer(name: str) -> None:
    gold, response = LONG[name]
    assert not verify(response, gold=gold).correct
