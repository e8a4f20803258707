"""One run from the first lease to the end, with scripted roles."""

from protocol import messages as m
from tests.learner.coordinator.harness import answer, trained


def test_run_goes_from_leases_to_batches_to_finished(build):
    h = build(**{"run.max_updates": 3})
    generator, rewardd, trainer = h.join("generator", "g"), h.join("rewardd", "r"), h.join("trainer", "t")
    plan = h.ask(trainer, m.ResumeRequest(last_batch_id=0, policy_version=0, num_ranks=2))
    assert plan.replay == [] and plan.attempt == 1
    versions = []
    for _ in range(50):
        for lease in h.lease(generator, version=h.coordinator.facts.policy_version):
            for slot in lease.slots:
                ack = h.ask(rewardd, *answer(lease, slot, score=float(slot)))
                assert ack.status == "accepted"
        reply = h.ask(
            trainer, m.BatchRequest(after_batch_id=h.coordinator.facts.last_batch, policy_version=0, wait_s=0)
        )
        if isinstance(reply, m.BatchNotReady):
            assert reply.waiting_for == "finished"
            break
        shards = [
            h.ask(trainer, m.ShardRequest(batch_id=reply.batch_id, rank=rank, num_ranks=2)).indices for rank in range(2)
        ]
        assert sorted(shards[0] + shards[1]) == list(range(4))
        versions.append(reply.policy_version)
        assert h.ask(trainer, trained(reply)).detail == "counted"
    assert versions == [0, 1, 2]
    assert h.coordinator.facts.state == "finished"
    summary = h.summary()
    assert summary["balanced"] and summary["trained"] == 12 and summary["in_flight"] == 0
    assert h.ask(generator, m.Heartbeat(state="idle")).command == "stop"


def test_nothing_is_acknowledged_before_the_commit(build):
    h = build()
    generator, rewardd = h.join("generator", "g"), h.join("rewardd", "r")
    lease = h.lease(generator)[0]
    h.give(rewardd, *answer(lease, 0))
    h.crash()  # the answer was taken but not committed: it was not acknowledged either
    rewardd = h.join("rewardd", "r")
    assert h.summary()["balanced"]
    assert h.ask(rewardd, *answer(lease, 0)).status == "accepted"
    h.crash()
    rewardd = h.join("rewardd", "r")
    assert h.ask(rewardd, *answer(lease, 0)).status == "duplicate"
