"""Chaos in short form: the same experiment as `slipstream soak`, for half a minute."""

import json
from pathlib import Path

import pytest

from deploy.cli import run
from deploy.soak.measure import Sample, slope_per_h
from deploy.soak.report import Report
from deploy.soak.trainer import surviving


@pytest.mark.slow
def test_nothing_is_lost_doubled_or_waited_for_while_roles_are_tormented(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "soak"
    options = ["--minutes", "0.5", "--every", "1", "--rate", "150", "--seed", "5", "--json", "--folder", str(folder)]
    status = run(["soak", *options])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    logs = "".join((folder / "logs" / f"{name}.log").read_text()[-2000:] for name in ("coordinator", "trainer"))
    assert status == 0, f"{report}\n{logs}"
    assert report["conserved"] and report["trained_twice"] == report["deadline_overruns"] == 0
    assert report["kills"] > 0 and report["freezes"] > 0 and report["batches"] > 3
    assert report["ledger"]["trained"] == 16 * report["batches"]
    assert {"drops", "rss_slope_mb_per_h", "fd_slope_per_h"} <= report.keys()


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    assert run(["soak", "--minutes", "1", "--folder", str(tmp_path)]) == 64
    assert "is not empty" in capsys.readouterr().err


def test_growth_is_a_slope_within_lives_not_between_them() -> None:
    def life(pid: int, level: float, per_s: float) -> list[Sample]:
        return [Sample("r", pid, float(age), level + per_s * age, 5, 3) for age in range(100)]

    samples = life(1, 100.0, 0.01) + life(2, 900.0, 0.01)
    assert slope_per_h(samples, "rss_mb", warm_up_s=10.0) == pytest.approx(36.0)
    assert slope_per_h(samples, "num_fds", warm_up_s=10.0) == 0.0
    assert slope_per_h(samples, "rss_mb", warm_up_s=10.0, min_life_s=1000.0) == 0.0
    report = Report(minutes=60.0)
    report.check_growth(Sample("r-1", 1, float(age), 50.0 + age / 60, 9, 3) for age in range(1000))
    assert report.rss_slope_mb_per_h == pytest.approx(60.0) and not report.is_flat and not report.ok


def test_the_surviving_lineage_drops_what_a_dead_trainer_did_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "lineage.jsonl"
    records = [
        {"resume": 0},
        {"batch_id": 1, "slots": [[1, 0]]},
        {"batch_id": 2, "slots": [[2, 0]]},
        {"resume": 1},
        {"batch_id": 2, "slots": [[2, 0]]},
        {"batch_id": 3, "slots": [[3, 0]]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [batch["batch_id"] for batch in surviving(path)] == [1, 2, 3]
    report = Report()
    assert report.ok and report.as_dict()["ok"]
