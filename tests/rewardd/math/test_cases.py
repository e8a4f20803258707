"""The recorded cases: verdict, time limit of the pathological ones, agreement of the exact stage."""

import json
import time
from pathlib import Path

import pytest

from rewardd.math import exact_verdict, verify

CASES = [json.loads(line) for line in (Path(__file__).parent / "math_cases.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_recorded_case(case: dict) -> None:
    started = time.process_time()
    result = verify(case["response"], gold=case["gold"])
    elapsed = time.process_time() - started
    assert result.correct is case["expected"], (case["why"], result)
    if "max_seconds" in case:
        assert elapsed < case["max_seconds"]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_exact_stage_never_contradicts(case: dict) -> None:
    result = exact_verdict(case["response"], gold=case["gold"])
    assert result is None or result.correct is case["expected"]


def test_most_recorded_cases_need_no_slow_stage() -> None:
    undecided = [case["id"] for case in CASES if exact_verdict(case["response"], gold=case["gold"]) is None]
    assert len(undecided) < len(CASES) // 10, undecided
