"""Backlog and duplicates with real processes: coordinator, reward daemons and scripted generators."""

import os
import signal
from pathlib import Path

from protocol.errors import ExitStatus
from tests.support.ledger_queries import TRAINED_TWICE
from tests.support.roles import ask_status
from tests.support.stack import StandInTrainer, running_stack, write_config
from tests.support.wait import wait_until

FAST = {"tokens_per_s": 5000.0, "mean_tokens": 12, "receive": False}


def test_b37_fast_generators_before_a_slow_learner_leave_a_bounded_backlog_that_is_shown(tmp_path: Path) -> None:
    config_path = write_config(tmp_path, generators__engine_args=FAST, run__max_updates=8)
    with running_stack(config_path) as stack:
        for role, name in (("coordinator", ""), ("rewardd", ""), ("generator", "g0"), ("generator", "g1")):
            stack.start(role, name)
        trainer = StandInTrainer(stack.config, seconds_per_batch=0.5)
        trainer.start()
        config, depths, ages = stack.config, [], []
        bound = (config.algorithm.max_staleness + 1) * config.learner.groups_per_batch

        def over() -> bool:
            if stack.num_trained():
                status = ask_status(config)
                depths.append(stack.query("SELECT COUNT(*) FROM groups WHERE state = 'in_flight'")[0][0])
                ages.append(status.queues["oldest_age_s"])
            return not trainer.is_alive()

        wait_until(over, deadline_s=120, what="end of the run")
        assert trainer.ended_with == "finished", stack.log("coordinator")[-3000:]
        for name in ("g0", "g1"):
            assert stack.processes[name].wait(30) == ExitStatus.FINISHED, stack.log(name)
        assert max(depths) == bound  # slowed, not idle
        assert max(ages) > 0
        ledger = stack.ledger()
    assert ledger["balanced"] and ledger["trained"] == 8 * 16
    assert ledger["retired"] <= bound * config.learner.group_size


def test_b33_b38_answers_sent_to_a_frozen_daemon_and_again_to_another_count_once(tmp_path: Path) -> None:
    config_path = write_config(tmp_path, transport__ack_deadline_s=1.5, transport__peer_timeout_s=1.5)
    with running_stack(config_path) as stack:
        for role, name in (("coordinator", ""), ("rewardd", "r0"), ("rewardd", "r1"), ("generator", "")):
            stack.start(role, name)
        trainer = StandInTrainer(stack.config, seconds_per_batch=0.2)
        trainer.start()
        wait_until(lambda: stack.num_trained() >= 1, deadline_s=60, what="a trained batch")
        frozen = stack.processes["r0"].pid
        os.kill(frozen, signal.SIGSTOP)
        try:
            wait_until(lambda: stack.num_trained() >= 4, deadline_s=60, what="batches without the frozen daemon")
        finally:
            os.kill(frozen, signal.SIGCONT)
        trainer.join(90)
        assert trainer.ended_with == "finished", stack.log("coordinator")[-3000:]
        for name, process in stack.processes.items():
            assert process.wait(30) == ExitStatus.FINISHED, stack.log(name)
        assert stack.query(TRAINED_TWICE) == []
        counted = dict(stack.query("SELECT name, value FROM counters WHERE name LIKE 'trajectories/%'"))
        ledger = stack.ledger()
    assert counted["trajectories/accepted"] >= 6 * 16 and set(counted) <= {
        "trajectories/accepted",
        "trajectories/duplicate",
        "trajectories/unknown",
    }, counted
    assert ledger["balanced"] and ledger["trained"] == 6 * 16
