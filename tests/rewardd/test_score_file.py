"""Offline scoring through the daemon's workers."""

import json

import pytest

from protocol.config.services import RewarddSection
from rewardd.score_file import score_lines


def test_lines_are_scored_in_order_and_bad_ones_named() -> None:
    lines = [
        json.dumps({"id": "a", "gold": "42", "response": "\\boxed{42}"}),
        "{not json",
        "",
        json.dumps({"id": "b", "kind": "math", "gold": ["1/2", "x"], "response": "\\boxed{0.5}", "unknown": 1}),
        json.dumps({"id": "c", "response": "\\boxed{42}"}),
        json.dumps({"id": "d", "gold": "42", "response": "\\boxed{43}"}),
        json.dumps({"id": 5, "kind": "math", "response": "\\boxed{43}"}),
    ]
    results = list(score_lines(lines))
    assert [(r["id"], r["verdict"], r["score"]) for r in results] == [
        ("a", "correct", 1.0),
        (None, "rejected", None),
        ("b", "correct", 1.0),
        ("c", "rejected", None),
        ("d", "wrong", 0.0),
        (5, "rejected", None),
    ]
    assert [r["line"] for r in results if r["reason"] == "bad_line"] == [2, 5, 7]
    assert "needs gold" in results[-1]["detail"]


def test_profile_reaches_the_workers() -> None:
    line = json.dumps({"id": 1, "gold": "2\\pi", "response": "\\boxed{2\\pi h}"})
    (strict,), (compatible,) = list(score_lines([line])), list(score_lines([line], profile="or1-compat"))
    assert (strict["verdict"], compatible["verdict"]) == ("wrong", "correct")


@pytest.mark.parametrize(
    ("kind", "tests", "program", "verdict"),
    [
        ("stdin", {"inputs": ["2 3"], "outputs": ["5"]}, "print(sum(map(int, input().split())))", "correct"),
        ("stdin", {"inputs": ["2 3"], "outputs": ["6"]}, "print(sum(map(int, input().split())))", "wrong"),
        (
            "function",
            {"fn_name": "f", "inputs": ["[1, 2]"], "outputs": ["3"]},
            "def f(x):\n    return sum(x)",
            "correct",
        ),
        ("assert", {"assert_case": ["assert f(2) == 4"]}, "def f(x):\n    return 2 * x", "correct"),
    ],
)
def test_programs_run_in_the_sandbox_and_say_its_tier(kind, tests, program, verdict) -> None:
    line = {"id": "x", "kind": kind, "tests": tests, "response": f"```python\n{program}\n```", "time_limit_s": 10}
    (result,) = score_lines([json.dumps(line)], section=RewarddSection(max_retries=0))
    if result["reason"] == "unavailable":
        pytest.skip(f"no sandbox on this machine: {result['detail']}")
    assert result["verdict"] == verdict and result["isolation"]
