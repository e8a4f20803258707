"""Random interleavings of everything that can happen to a slot, with crashes: conservation and counted-once hold."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol import messages as m
from tests.learner.coordinator.harness import Harness, answer, make_config, prompt_set, rows, trained

GENERATORS = st.sampled_from(["a", "b"])
PICK = st.integers(min_value=0, max_value=1_000_000)


class LedgerMachine(RuleBasedStateMachine):
    """Drives the coordinator through its messages; `acknowledged` is what the outside was promised."""

    @initialize(filtering=st.booleans(), attempts=st.integers(1, 3))
    def start(self, filtering: bool, attempts: int) -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="ledger-")
        folder = Path(self.scratch.name)
        config = make_config(
            folder,
            **{
                "run.max_updates": 1000,
                "coordinator.max_attempts": attempts,
                "data.max_prompt_failures": 2,
                "algorithm.filter_groups": "equal_rewards" if filtering else "none",
                "learner.checkpoint.keep": 1,
            },
        )
        self.h = Harness(folder, config, prompt_set(folder, rows(8)))
        self.leases: list[m.Lease] = []
        self.acknowledged: dict[tuple[int, int], str] = {}
        self.trained_slots: set[tuple[int, int]] = set()
        self.join_all()
        self.h.ask("t/1", m.ResumeRequest(last_batch_id=0, policy_version=0, num_ranks=1))

    def join_all(self) -> None:
        for role, name in (("generator", "a"), ("generator", "b"), ("rewardd", "r"), ("trainer", "t")):
            self.h.join(role, name)

    def pick(self, number: int) -> tuple[m.Lease, int] | None:
        if not self.leases:
            return None
        lease = self.leases[number % len(self.leases)]
        return lease, lease.slots[number % len(lease.slots)]

    @rule(generator=GENERATORS, max_slots=st.integers(1, 5))
    def lease(self, generator: str, max_slots: int) -> None:
        self.leases += self.h.lease(f"{generator}/1", max_slots, version=self.h.coordinator.facts.policy_version)
        self.leases = self.leases[-40:]

    @rule(number=PICK, score=st.sampled_from([0.0, 0.5, 1.0]), kind=st.sampled_from([None, None, None, "unjudged"]))
    def deliver(self, number: int, score: float, kind: str | None) -> None:
        picked = self.pick(number)
        if picked is None:
            return
        lease, slot = picked
        ack = self.h.ask("r/1", *answer(lease, slot, score=score, kind=kind))
        key = (lease.group_id, slot)
        if ack.status == "accepted" and kind is None:
            assert key not in self.acknowledged, "one slot counted two answers"
            self.acknowledged[key] = "accepted"
        if ack.status == "duplicate":
            assert key in self.acknowledged

    @rule(number=PICK)
    def deliver_and_crash_before_the_commit(self, number: int) -> None:
        picked = self.pick(number)
        if picked is not None:
            self.h.give("r/1", *answer(picked[0], picked[1]))
        self.crash()

    @rule()
    def crash(self) -> None:
        self.h.crash()
        self.join_all()

    @rule(generator=GENERATORS, orderly=st.booleans())
    def generator_leaves_and_returns(self, generator: str, orderly: bool) -> None:
        self.h.coordinator.gone(f"{generator}/1", orderly=orderly)
        self.h.turn()
        self.h.join("generator", generator)

    @rule(generator=GENERATORS, number=PICK)
    def hand_back(self, generator: str, number: int) -> None:
        picked = self.pick(number)
        if picked is not None:
            lease, slot = picked
            body = m.HandBack(group_id=lease.group_id, attempt=lease.attempt, slots=[slot], reason="draining")
            assert isinstance(self.h.ask(f"{generator}/1", body), m.Ack)

    @rule(seconds=st.sampled_from([0.5, 5.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.h.now += seconds
        self.h.turn()

    @rule(applied=st.sampled_from([1, 1, 0]), repeat=st.booleans())
    def train(self, applied: int, repeat: bool) -> None:
        facts = self.h.coordinator.facts
        request = m.BatchRequest(after_batch_id=facts.last_batch, policy_version=facts.policy_version, wait_s=0.0)
        plan = self.h.ask("t/1", request)
        if not isinstance(plan, m.BatchPlan):
            return
        keys = [(item.group_id, item.slot) for item in plan.items]
        assert len(set(keys)) == len(keys) == 4
        assert not self.trained_slots & set(keys), "a slot was trained twice"
        assert all(key in self.acknowledged for key in keys)
        self.h.ask("t/1", m.ShardRequest(batch_id=plan.batch_id, rank=0, num_ranks=1))
        for _ in range(1 + repeat):
            self.h.ask("t/1", trained(plan, attempt=facts.attempt, applied=applied))
        self.trained_slots |= set(keys)

    @rule(back=st.integers(0, 2))
    def trainer_restarts(self, back: int) -> None:
        facts = self.h.coordinator.facts
        kept = self.h.store.connection.execute("SELECT COALESCE(MAX(batch_id), 0) FROM checkpoints").fetchone()[0]
        at = max(kept, facts.last_batch - back)
        plan = self.h.ask("t/1", m.ResumeRequest(last_batch_id=at, policy_version=0, num_ranks=2))
        assert plan.replay == list(range(at + 1, facts.last_batch + 1))
        for batch_id in plan.replay:
            for rank in range(2):
                shard = self.h.ask("t/1", m.ShardRequest(batch_id=batch_id, rank=rank, num_ranks=2))
                assert isinstance(shard, m.Shard)
        self.h.ask("t/1", m.ResumeRequest(last_batch_id=facts.last_batch, policy_version=0, num_ranks=1))

    @rule()
    def checkpoint(self) -> None:
        facts = self.h.coordinator.facts
        body = m.CheckpointCommitted(batch_id=facts.last_batch, policy_version=facts.policy_version, path="c")
        self.h.ask("t/1", body)

    @invariant()
    def conservation(self) -> None:
        if not hasattr(self, "h"):
            return
        summary = self.h.summary()
        assert summary["balanced"], summary
        assert summary["trained"] == len(self.trained_slots)
        live = self.h.coordinator.ledger.summary()
        assert live == {name: summary[name] for name in live}
        assert len(self.h.coordinator.ledger.train) <= 4

    def teardown(self) -> None:
        if hasattr(self, "scratch"):
            self.h.store.connection.close()
            self.scratch.cleanup()


LedgerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedger = pytest.mark.slow(LedgerMachine.TestCase)
