"""What docs/operations.md asks of the ledger, with known answers."""

from protocol import messages as m
from tests.learner.coordinator.harness import answer, trained
from tests.learner.coordinator.test_batches import joined, resume
from tests.support.ledger_queries import SAMPLED_AGES, TRAINED_AGES, TRAINED_TWICE


def next_plan(h, *, versions):
    """A batch of 4 answers of 5 tokens, sampled by `versions`."""
    version = h.coordinator.facts.policy_version
    for lease in h.lease("g/1", max_slots=4, version=version):
        for slot in lease.slots:
            h.ask("r/1", *answer(lease, slot, versions=versions))
    last = h.coordinator.facts.last_batch
    plan = h.ask("t/1", m.BatchRequest(after_batch_id=last, policy_version=version, wait_s=0))
    assert isinstance(plan, m.BatchPlan), plan
    return plan


def ask_ledger(h, sql):
    return h.store.connection.execute(sql).fetchall()


def test_ages_of_trained_tokens_are_those_of_the_surviving_attempt(build):
    h = joined(build(60))
    resume(h, 0)
    first = next_plan(h, versions=[0] * 5)
    num = len(first.items)
    h.ask("t/1", trained(first, ages={0: 5 * num}))
    second = next_plan(h, versions=[0, 0, 0, 1, 1])
    h.ask("t/1", trained(second, ages={0: 2 * num, 1: 3 * num}))
    assert ask_ledger(h, TRAINED_AGES) == [(1, 0, 0, 5 * num), (2, 1, 1, 5 * num)]
    assert ask_ledger(h, SAMPLED_AGES) == [(1, 0, 5 * num), (2, 0, 2 * num), (2, 1, 3 * num)]

    h.crash()
    joined(h)
    assert resume(h, 1, version=1).replay == [2]
    h.ask("t/1", trained(second, attempt=2, replayed=True, ages={0: 2 * num}))
    assert ask_ledger(h, TRAINED_AGES) == [(1, 0, 0, 5 * num), (2, 1, 0, 2 * num)]
    assert ask_ledger(h, TRAINED_TWICE) == []


def test_a_batch_whose_report_was_lost_counts_the_tokens_within_the_bound(build):
    h = joined(build(60))
    resume(h, 0)
    for _ in range(2):
        h.ask("t/1", trained(next_plan(h, versions=[0] * 5)))
    plan = next_plan(h, versions=[0, 1, 1, 2, 2])
    resume(h, 3, version=3)
    num = len(plan.items)
    assert ask_ledger(h, TRAINED_AGES) == [(3, 2, 1, 4 * num)]


def test_an_answer_in_two_batches_would_show(build):
    h = joined(build(60))
    resume(h, 0)
    plan = next_plan(h, versions=[0] * 5)
    item = plan.items[0]
    row = (2, item.group_id, item.slot, 0, 5)
    h.store.execute("INSERT INTO sampled_tokens VALUES (?, ?, ?, ?, ?)", row)
    assert ask_ledger(h, TRAINED_TWICE) == [(item.group_id, item.slot, 2)]
