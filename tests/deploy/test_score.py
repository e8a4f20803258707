"""`slipstream score`: options reach the scorers, the exit status says whether every line got a verdict."""

import json
from pathlib import Path

import pytest

from deploy.cli import run
from protocol.errors import ExitStatus


def score(path: Path, lines: list[str], capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[str]]:
    path.write_text("\n".join(lines) + "\n")
    status = run(["score", str(path), *options])
    return status, [json.loads(line)["verdict"] for line in capsys.readouterr().out.splitlines()]


def test_profiles_and_require_box_change_the_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    line = [json.dumps({"response": "So 3 plus 4 gives 7 apples in total", "gold": "7"})]
    assert score(path, line, capsys) == (0, ["wrong"])
    assert score(path, line, capsys, "--profile", "or1-compat") == (0, ["correct"])
    line = [json.dumps({"response": "The answer is 7.", "gold": "7"})]
    assert score(path, line, capsys) == (0, ["correct"])
    assert score(path, line, capsys, "--require-box") == (0, ["wrong"])


def test_a_line_without_a_verdict_shows_in_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["{", json.dumps({"response": "The answer is 7.", "gold": "7"})]
    assert score(tmp_path / "a.jsonl", lines, capsys) == (ExitStatus.FAILED, ["rejected", "correct"])
    assert run(["score", str(tmp_path / "absent")]) == ExitStatus.CONFIG
    assert run(["score", str(tmp_path / "a.jsonl"), "--profile", "lax"]) == ExitStatus.USAGE


def test_results_go_to_a_file_and_bad_lines_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        b'{"id": 1, "response": "The answer is 7.", "gold": "7"}',
        b"\xff\xfe",
        b'{"id": 3, "response": "x", "kind": "stdin"}',
        b'{"id": 4, "response": "x", "tests": {"inputs": ["1"], "outputs": ["1"]}, "memory_mb": 16}',
        b'{"id": 5, "response": "x", "gold": ""}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    assert run(["score", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]) == ExitStatus.FAILED
    shown = capsys.readouterr()
    assert shown.out == ""
    for number in (2, 3, 4):
        assert f"line {number}: " in shown.err
    results = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    keys = {"id", "verdict", "score", "reason", "isolation", "elapsed_ms"}
    assert all(keys <= set(result) for result in results)
    assert [result.get("line") for result in results] == [None, 2, 3, 4, None]
    assert [result["verdict"] for result in results] == ["correct", *["rejected"] * 4]
    assert run(["score", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "no" / "out")]) == ExitStatus.CONFIG
