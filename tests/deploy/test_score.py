"""`slipstream score`: JSON lines in, JSON lines out, in order, by the daemon's own scorers."""

import json
from pathlib import Path

import pytest

from deploy.cli import run
from protocol.errors import ExitStatus

MATH = [
    ("The answer is 7.", "7", "correct"),
    ("So we get \\boxed{\\frac{6}{8}}.", "\\frac{3}{4}", "correct"),
    ("The answer is 8.", "7", "wrong"),
    ("I do not know.", "7", "wrong"),
]


def score(path: Path, lines: list[str], capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[dict]]:
    path.write_text("\n".join(lines) + "\n")
    status = run(["score", str(path), *options])
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_verdicts_come_in_order_with_their_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"id": f"m{i}", "response": r, "gold": g}) for i, (r, g, _) in enumerate(MATH * 30)]
    status, verdicts = score(tmp_path / "a.jsonl", lines, capsys)
    assert status == 0
    assert [v["id"] for v in verdicts] == [f"m{i}" for i in range(len(lines))]
    assert [v["kind"] for v in verdicts] == [kind for _, _, kind in MATH] * 30


def test_profiles_and_require_box_change_the_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [json.dumps({"response": "3 + 4 = 7", "reward_model": {"ground_truth": "7"}})]
    assert score(tmp_path / "a", line, capsys)[1][0]["kind"] == "wrong"
    assert score(tmp_path / "a", line, capsys, "--profile", "or1-compat")[1][0]["kind"] == "correct"
    line = [json.dumps({"response": "The answer is 7.", "ground_truth": "7"})]
    assert score(tmp_path / "a", line, capsys, "--require-box")[1][0]["kind"] == "wrong"


def test_a_line_that_cannot_be_scored_is_rejected_and_the_rest_is_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["{", json.dumps({"response": "The answer is 7.", "ground_truth": "7"}), json.dumps({"response": "7"})]
    status, verdicts = score(tmp_path / "a.jsonl", lines, capsys)
    assert status == ExitStatus.FAILED
    assert [v["kind"] for v in verdicts] == ["rejected", "correct", "rejected"]
    assert run(["score", str(tmp_path / "absent")]) == ExitStatus.CONFIG
    assert run(["score", str(tmp_path / "a.jsonl"), "--profile", "lax"]) == ExitStatus.CONFIG
