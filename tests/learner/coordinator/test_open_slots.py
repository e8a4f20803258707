"""Slots that come back are in line once, whatever way they left it."""

from protocol import messages as m
from tests.learner.coordinator.harness import Harness, make_config, prompt_set, rows


def test_b38_slots_returned_by_a_goodbye_are_leased_once_each(tmp_path):
    harness = Harness(tmp_path, make_config(tmp_path), prompt_set(tmp_path, rows(20)))
    first = harness.join("generator", "one")
    taken = {(lease.group_id, slot) for lease in harness.lease(first) for slot in lease.slots}
    harness.give(first, m.Goodbye(reason="done"))
    harness.turn()
    second = harness.join("generator", "two")
    again = [(lease.group_id, slot) for lease in harness.lease(second) for slot in lease.slots]
    assert sorted(again) == sorted(taken) and len(set(again)) == len(again)
    assert harness.summary()["balanced"]
