"""`slipstream ledger`: the conservation equation and any row of it."""

import json
from pathlib import Path

import pytest

from deploy.cli import run
from tests.learner.coordinator.harness import Harness, answer, make_config, prompt_set, rows


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    config = make_config(tmp_path)
    harness = Harness(tmp_path, config, prompt_set(tmp_path, rows(8)))
    generator, rewardd = harness.join("generator", "g"), harness.join("rewardd", "r")
    leases = harness.lease(generator)
    harness.ask(rewardd, *answer(leases[0], leases[0].slots[0]))
    harness.store.connection.close()
    return Path(config.run.dir)


def test_the_equation_as_json_has_the_documented_keys(run_dir: Path, capsys) -> None:
    assert run(["ledger", "--json", str(run_dir)]) == 0
    summary = json.loads(capsys.readouterr().out)
    names = ["issued", "trained", "filtered", "retired", "quarantined", "reissued", "in_flight", "balanced"]
    assert list(summary) == names
    assert summary["balanced"] is True and summary["in_flight"] == summary["issued"] > 0


def test_any_row_by_group_slot_or_prompt(run_dir: Path, capsys) -> None:
    assert run(["ledger", str(run_dir), "--group", "1", "--slot", "0", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["state"], row["attempts"], row["purpose"], row["slot"]) == ("answered", 1, "train", 0)
    assert run(["ledger", str(run_dir), "--prompt", row["prompt_id"]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "state=answered" in lines[0] and "state=leased" in lines[1]
    assert run(["ledger", str(run_dir), "--group", "999"]) == 64
    assert "holds no slot with group_id 999" in capsys.readouterr().err
