"""Reading a run's records: the clean curve, and before against after."""

import json
import math
from pathlib import Path

from deploy.report.records import comparisons, read_jsonl, surviving, table_lines


def batch(attempt: int, batch_id: int) -> dict:
    return {"attempt": attempt, "batch_id": batch_id}


def test_b76_records_of_an_abandoned_attempt_leave_the_curve_and_both_are_told_apart() -> None:
    records = [batch(1, 1), batch(1, 2), batch(1, 3), batch(2, 2), batch(2, 3), batch(2, 4)]
    assert surviving(records) == [batch(1, 1), batch(2, 2), batch(2, 3), batch(2, 4)]


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"a": 1}\n{"a": \n[1]\n{"a": 2}\n{"a')
    assert read_jsonl(tmp_path / "m.jsonl") == [{"a": 1}, {"a": 2}]
    assert read_jsonl(tmp_path / "absent.jsonl") == []


def evaluation(kind: str, version: int, mean: float | None, error: float | None = 0.03) -> dict:
    return {"policy_version": version, "kind": kind, "k": 4, "num_prompts": 96, "mean": mean, "standard_error": error}


def test_first_and_last_evaluation_are_compared_in_standard_errors() -> None:
    rows = comparisons(
        [
            evaluation("greedy", 0, 0.4),
            evaluation("avg@k", 0, 0.3),
            evaluation("greedy", 5, 0.1),
            evaluation("greedy", 9, 0.6, 0.04),
            evaluation("avg@k", 9, None),
        ]
    )
    assert [row.kind for row in rows] == ["greedy"]
    assert math.isclose(rows[0].difference, 0.2)
    assert math.isclose(rows[0].standard_errors, 0.2 / 0.05)
    text = "\n".join(table_lines(rows))
    assert "0.400 ± 0.030" in text and "+0.200" in text and "+4.0" in text


def test_no_spread_at_all_is_still_a_table() -> None:
    rows = comparisons([evaluation("greedy", 0, 0.0, None), evaluation("greedy", 1, 1.0, None)])
    assert rows[0].standard_errors == math.inf
    assert json.dumps(table_lines(rows)) and table_lines([]) == ["no evaluation before and after"]
