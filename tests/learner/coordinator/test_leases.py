"""Admission, renewal by progress, moving with tokens, generators that come and go."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.coordinator.admission import Admission
from protocol import messages as m
from tests.learner.coordinator.harness import answer, trained


@given(eta=st.integers(0, 5), size=st.integers(1, 9), version=st.integers(0, 50), rank=st.integers(0, 60))
def test_no_admitted_group_can_be_trained_older_than_eta(eta, size, version, rank):
    admission = Admission(eta, size)
    if admission.admits(rank):
        minimum = admission.min_version(rank, policy_version=version)
        assert admission.train_version(rank, policy_version=version) - minimum <= eta or minimum == 0
        assert minimum <= version  # an up-to-date generator is never refused: no deadlock


def test_admission_stops_at_eta_plus_one_batches_and_ends_give_places_back(build):
    h = build()
    generator, rewardd = h.join("generator", "g"), h.join("rewardd", "r")
    assert sum(len(lease.slots) for lease in h.lease(generator)) == 8  # (1 + 1) * 2 groups of 2
    assert h.ask(generator, m.LeaseRequest(max_slots=4, policy_version=0)).waiting_for == "staleness"
    h.coordinator.ledger.fail(h.coordinator.ledger.train[1], "test")
    assert len(h.lease(generator)) == 1
    del rewardd


def test_skipped_updates_do_not_stop_leasing(build):
    h = build(60, **{"run.max_updates": 20})
    generator, rewardd, trainer = h.join("generator", "g"), h.join("rewardd", "r"), h.join("trainer", "t")
    for _ in range(12):
        for lease in h.lease(generator):
            for slot in lease.slots:
                h.ask(rewardd, *answer(lease, slot, score=float(slot)))
        h.update(trainer, version=0, applied=0)
    assert h.coordinator.facts.policy_version == 0 and h.summary()["trained"] == 12 * 4


def test_eta_zero_waits_for_the_weights(build):
    h = build(**{"algorithm.max_staleness": 0})
    generator, rewardd, trainer = h.join("generator", "g"), h.join("rewardd", "r"), h.join("trainer", "t")
    for lease in h.lease(generator):
        for slot in lease.slots:
            h.ask(rewardd, *answer(lease, slot))
    h.update(trainer, version=0)
    assert h.ask(generator, m.LeaseRequest(max_slots=4, policy_version=0)).waiting_for == "weights"
    assert len(h.lease(generator, version=1)) == 2


def test_progress_alone_renews_a_lease(build):
    h = build()
    a, b = h.join("generator", "a"), h.join("generator", "b")
    lease = h.lease(a, 1)[0]
    for tokens in (1, 2, 2, 2):
        h.now += 6.0
        report = m.SlotProgress(group_id=lease.group_id, slot=lease.slots[0], attempt=1, num_tokens=tokens)
        h.ask(a, m.Heartbeat(state="serving", progress=[report]))
    moved = next(x for x in h.lease(b) if x.group_id == lease.group_id and x.slots == [0])
    assert moved.attempt == 2
    assert [c.attempt for c in h.ask(a, m.Heartbeat(state="serving")).cancel] == [1]


def test_handed_back_tokens_survive_a_crash_and_move_with_the_lease(build):
    h = build()
    a = h.join("generator", "a")
    lease = h.lease(a, 1)[0]
    prefix = f"partial/{lease.group_id}/0/"
    arrays = {
        prefix + "token_ids": np.asarray([65, 66, 67], "<i4"),
        prefix + "logp_behaviour": np.asarray([-1, -2, -3], "<f4"),
        prefix + "versions": np.zeros(3, "<i4"),
        prefix + "loss_mask": np.asarray([1, 0, 1], "|u1"),
    }
    partial = m.PartialAnswer(group_id=lease.group_id, slot=0, num_tokens=3)
    h.ask(a, m.HandBack(group_id=lease.group_id, attempt=1, slots=[0], partial=[partial], reason="draining"), arrays)
    h.crash()
    b = h.join("generator", "b")
    h.give(b, m.LeaseRequest(max_slots=1, policy_version=0))
    grant = h.turn()[0]
    assert grant.body.leases[0].partial == [partial] and grant.body.leases[0].attempt == 2
    assert grant.arrays[prefix + "token_ids"].tolist() == [65, 66, 67]
    assert grant.arrays[prefix + "logp_behaviour"].tolist() == [-1, -2, -3]
    assert grant.arrays[prefix + "loss_mask"].tolist() == [1, 0, 1]


def test_b13_a_generator_that_dies_gives_its_leases_back_at_once(build):
    h = build()
    a, b = h.join("generator", "a"), h.join("generator", "b")
    first = h.lease(a, 4)
    h.coordinator.gone(a, orderly=False)
    again = h.lease(b, 4)
    assert {(x.group_id, s) for x in again for s in x.slots} == {(x.group_id, s) for x in first for s in x.slots}
    assert all(lease.attempt == 2 for lease in again)


def test_b30_a_restarted_generator_replaces_its_earlier_incarnation(build):
    h = build()
    h.lease(h.join("generator", "a", incarnation="1"), 4)
    again = h.lease(h.join("generator", "a", incarnation="2"), 4)
    assert {lease.attempt for lease in again} == {2}


def test_leases_survive_a_restart_of_the_coordinator(build):
    h = build()
    a, b = h.join("generator", "a"), h.join("generator", "b")
    lease = h.lease(a, 8)[0]
    h.crash()
    a, b, rewardd = h.join("generator", "a"), h.join("generator", "b"), h.join("rewardd", "r")
    assert h.lease(b, 8) == []  # still a's
    assert h.ask(rewardd, *answer(lease, 0)).status == "accepted"
    h.crash()
    b = h.join("generator", "b")  # a does not come back
    h.now += 5.0
    h.turn()
    assert sum(len(x.slots) for x in h.lease(b, 8)) == 7


def test_a_short_generator_gets_part_of_a_group(build):
    h = build()
    leases = h.lease(h.join("generator", "g"), 1)
    assert [lease.slots for lease in leases] == [[0]]
    assert [lease.slots for lease in h.lease("g/1", 2)] == [[1], [0]]


def test_seeded_slots_have_leases_and_seeds_of_their_own(build):
    h = build(**{"sampling.seeded": True})
    leases = h.lease(h.join("generator", "g"), 2)
    assert [lease.slots for lease in leases] == [[0], [1]]
    assert leases[0].sampling.seed != leases[1].sampling.seed


def test_pause_and_stop_end_leasing(build):
    h = build()
    generator, operator, trainer = h.join("generator", "g"), h.join("client", "cli"), h.join("trainer", "t")
    h.ask(operator, m.ControlRequest(command="pause"))
    assert h.ask(generator, m.LeaseRequest(max_slots=4, policy_version=0)).waiting_for == "paused"
    reply = h.ask(trainer, m.BatchRequest(after_batch_id=0, policy_version=0, wait_s=0))
    assert reply.waiting_for == "paused"
    h.ask(operator, m.ControlRequest(command="resume"))
    assert h.lease(generator)
    h.ask(operator, m.ControlRequest(command="stop"))
    assert h.ask(generator, m.Heartbeat(state="serving")).command == "stop"
    reply = h.ask(trainer, m.BatchRequest(after_batch_id=0, policy_version=0, wait_s=60))
    assert reply.waiting_for == "stopped"
    h.crash()
    assert h.coordinator.facts.state == "running"


def test_b40_a_waiting_trainer_hears_what_is_missing(build):
    h = build()
    trainer = h.join("trainer", "t")
    request = m.BatchRequest(after_batch_id=0, policy_version=0, wait_s=0)
    assert h.ask(trainer, request).waiting_for == "generators"
    generator = h.join("generator", "g")
    assert h.ask(trainer, request).waiting_for == "reward"
    h.join("rewardd", "r", address="tcp://127.0.0.1:7")
    assert h.ask(trainer, request).waiting_for == "generation"
    assert h.ask(generator, m.Heartbeat(state="serving")).rewardd[0].address == "tcp://127.0.0.1:7"


def test_b32_a_newcomer_learns_versions_and_addresses_from_its_welcome(build):
    h = build()
    h.join("rewardd", "r", address="tcp://127.0.0.1:7")
    h.join("trainer", "t", weights_address="tcp://127.0.0.1:8")
    h.ask("t/1", m.VersionPublished(policy_version=3, epoch=1, generators=[], seconds=1.0))
    welcome = h.coordinator.accept(
        m.Hello(role="generator", name="g", incarnation="1", protocol_version=1, host="h", pid=1)
    )
    assert (welcome.published_version, welcome.weights_address) == (3, "tcp://127.0.0.1:8")
    assert welcome.rewardd[0].name == "r"


def test_hello_of_another_run_is_refused(build):
    h = build()
    hello = m.Hello(role="trainer", name="t", incarnation="1", protocol_version=1, host="h", pid=1, run_id="other")
    assert h.coordinator.accept(hello).code == "run_id"


@pytest.mark.parametrize("overtaken", [True, False])
def test_oldest_first_and_an_expired_group_lets_others_go_by(build, overtaken):
    h = build(**{"algorithm.max_staleness": 3})
    a, b = h.join("generator", "a"), h.join("generator", "b")
    rewardd, trainer = h.join("rewardd", "r"), h.join("trainer", "t")
    h.lease(a, 2)  # the oldest group, never answered
    for lease in h.lease(b, 4):
        for slot in lease.slots:
            h.ask(rewardd, *answer(lease, slot))
    request = m.BatchRequest(after_batch_id=0, policy_version=0, wait_s=0)
    reply = h.ask(trainer, request)
    assert isinstance(reply, m.BatchNotReady) and "[1]" in reply.detail
    if overtaken:
        h.now += 11.0
        plan = h.ask(trainer, request)
        assert {item.group_id for item in plan.items} == {2, 3}
        h.ask(trainer, trained(plan))
    assert h.summary()["balanced"]


def test_a_prompt_that_no_engine_can_answer_is_retired(build):
    h = build(**{"coordinator.max_attempts": 3})
    generator = h.join("generator", "g")
    for attempt in range(1, 4):
        lease = next(x for x in h.lease(generator) if x.group_id == 1)
        h.ask(generator, m.HandBack(group_id=1, attempt=attempt, slots=lease.slots, reason="engine refused it"))
    assert h.summary()["retired"] == 2 and h.summary()["balanced"]
