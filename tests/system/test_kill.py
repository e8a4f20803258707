"""kill -9 of real processes: coordinator, reward daemon, DeepSpeed trainer, generator in the weight group, supervisor.

The sampler is scripted; everything else is what a run has, started and restarted by `slipstream up`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ledger_queries import TRAINED_AGES, TRAINED_TWICE
from tests.support.supervised import SupervisedRun, supervised_run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

ROLES = ("generator-0", "rewardd-0", "trainer", "coordinator")
NUM_ITEMS = 4 * 4  # groups per batch, answers per group


def assert_ended_well(run: SupervisedRun, *, num_updates: int, num_attempts: int) -> None:
    """The run ended by itself, every slot is accounted for, each answer was trained once and none was too old.

    `num_attempts`: how often a trainer began.
    """
    assert run.wait_for_end() == 0, run.logs()
    assert run.query("SELECT value FROM meta WHERE key = 'run_state'") == [('"finished"',)]
    ledger = [sys.executable, "-m", "deploy", "ledger", str(run.run_dir), "--json"]
    summary = json.loads(subprocess.run(ledger, capture_output=True, check=True).stdout)
    assert summary["balanced"] and summary["trained"] == num_updates * NUM_ITEMS, summary
    batches = run.query("SELECT batch_id, state, policy_version, new_version FROM batches ORDER BY batch_id")
    assert batches == [(i + 1, "trained", i, i + 1) for i in range(num_updates)]
    ages = run.query(TRAINED_AGES)
    assert [row[0] for row in ages] == list(range(1, num_updates + 1))
    assert max(max_age for _, _, max_age, _ in ages) <= run.config.algorithm.max_staleness
    assert run.query(TRAINED_TWICE) == []
    assert run.query("SELECT COUNT(*) FROM (SELECT DISTINCT group_id, slot FROM sampled_tokens)") == [
        (num_updates * NUM_ITEMS,)
    ]
    records = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {record["batch_id"] for record in records} == set(range(1, num_updates + 1))
    assert max(record["attempt"] for record in records) == num_attempts
    assert max(record["actor/grad_norm"] for record in records) > 0
    assert (run.run_dir / "export" / "model.safetensors").is_file()


def test_each_role_killed_in_turn_in_one_run(tmp_path: Path) -> None:
    with supervised_run(tmp_path, run__max_updates=12) as run:
        for turn, name in enumerate(ROLES):
            run.wait_until_trained(2 * turn + 1)
            run.kill(name)
        assert_ended_well(run, num_updates=12, num_attempts=2)
        assert [run.role(name)["num_restarts"] for name in ROLES] == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ROLES)
def test_a_killed_role_is_restarted_and_the_run_ends(name: str, tmp_path: Path) -> None:
    with supervised_run(tmp_path, run__max_updates=8) as run:
        run.wait_until_trained(1)
        run.kill(name)
        assert_ended_well(run, num_updates=8, num_attempts=1 + (name == "trainer"))
        assert [run.role(other)["num_restarts"] for other in ROLES] == [int(other == name) for other in ROLES]


def test_after_a_loss_of_power_up_goes_on_where_the_run_was(tmp_path: Path) -> None:
    with supervised_run(tmp_path, run__max_updates=8) as run:
        run.wait_until_trained(3)
        run.lose_power()
        num_trained = run.num_trained()
        run.up()
        assert_ended_well(run, num_updates=8, num_attempts=2)
        assert num_trained < 8
