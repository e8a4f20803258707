"""Whole runs of role processes: coordinator, reward daemon and scripted generators, with a trainer stand-in."""

import signal
from pathlib import Path

from protocol.errors import ExitStatus
from tests.support.stack import StandInTrainer, running_stack, write_config
from tests.support.wait import wait_until


def test_generator_feeds_a_run_to_its_end(tmp_path: Path) -> None:
    config_path = write_config(tmp_path)
    with running_stack(config_path) as stack:
        for role in ("coordinator", "rewardd", "generator"):
            stack.start(role)
        trainer = StandInTrainer(stack.config)
        trainer.start()
        trainer.join(90)
        assert trainer.ended_with == "finished", stack.log("coordinator") + stack.log("generator")
        assert stack.processes["generator"].wait(20) == ExitStatus.FINISHED, stack.log("generator")
        assert stack.processes["rewardd"].wait(20) == ExitStatus.FINISHED, stack.log("rewardd")
        assert stack.processes["coordinator"].wait(20) == ExitStatus.FINISHED, stack.log("coordinator")
        ledger = stack.ledger()
    assert ledger["balanced"] and ledger["trained"] == 6 * 4 * 4
    eta = stack.config.algorithm.max_staleness
    for batch in trainer.trained:
        assert all(item.min_version >= batch.policy_version - eta for item in batch.items)


def test_b31_stopped_generator_hands_back_what_it_began(tmp_path: Path) -> None:
    config_path = write_config(
        tmp_path,
        generators__engine_args={"tokens_per_s": 4.0, "length": "constant", "mean_tokens": 20, "receive": False},
        generators__drain_s=0.5,
    )
    with running_stack(config_path) as stack:
        for role in ("coordinator", "rewardd", "generator"):
            stack.start(role)
        wait_until(lambda: stack.run_dir.joinpath("coordinator/ledger.sqlite").exists(), what="ledger", deadline_s=60)
        wait_until(lambda: stack.ledger()["in_flight"] > 0, what="leases", deadline_s=60)

        stack.processes["generator"].send_signal(signal.SIGTERM)
        assert stack.processes["generator"].wait(20) == ExitStatus.STOPPED, stack.log("generator")
        trainer = StandInTrainer(stack.config)
        trainer.start()
        stack.start("generator", "generator-2")
        trainer.join(120)
        assert trainer.ended_with == "finished", stack.log("coordinator")[-3000:]
        assert stack.ledger()["balanced"] and stack.ledger()["reissued"] > 0
