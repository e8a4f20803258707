"""What an incoming trajectory must be to count, and that it counts once."""

import numpy as np
import pytest

from protocol import messages as m
from tests.learner.coordinator.harness import answer


@pytest.fixture
def leased(build):
    h = build()
    generator, rewardd = h.join("generator", "g"), h.join("rewardd", "r")
    return h, generator, rewardd, h.lease(generator)[0]


def refused(h, rewardd, body, arrays) -> str:
    ack = h.ask(rewardd, body, arrays)
    assert ack.status == "refused"
    return ack.reason


def test_b19_id_beyond_the_tokenizer_is_refused_and_the_slot_leased_again(leased):
    h, generator, rewardd, lease = leased
    body, arrays = answer(lease, 0)
    arrays["token_ids"][-1] = 259
    assert "vocabulary: token id 259" in refused(h, rewardd, body, arrays)
    again = [x for x in h.lease(generator) if x.group_id == lease.group_id]
    assert [(x.slots, x.attempt) for x in again] == [([0], 2)]
    assert h.store.counters["refused/vocabulary"] == 1


@pytest.mark.parametrize("name", ["token_ids", "logp_behaviour", "versions", "loss_mask"])
def test_b20_a_length_that_disagrees_is_refused(leased, name):
    h, _, rewardd, lease = leased
    body, arrays = answer(lease, 0)
    arrays[name] = arrays[name][:-1]
    assert name in refused(h, rewardd, body, arrays)


@pytest.mark.parametrize(
    ("slug", "num_tokens", "broken"),
    [
        ("logp", 5, {"logp_behaviour": np.full(5, np.nan, "<f4")}),
        ("logp", 5, {"logp_behaviour": np.full(5, 0.5, "<f4")}),
        ("versions", 5, {"versions": np.ones(5, "<i4")}),
        ("loss_mask", 5, {"loss_mask": np.zeros(5, "|u1")}),
        ("too_long", 65, {}),
        ("empty", 0, {}),
    ],
)
def test_other_malformed_trajectories_are_refused_with_a_reason(leased, slug, num_tokens, broken):
    h, _, rewardd, lease = leased
    body, arrays = answer(lease, 0, num_tokens=num_tokens)
    assert refused(h, rewardd, body, arrays | broken).startswith(slug)
    assert h.summary()["balanced"] and h.store.counters[f"refused/{slug}"] == 1


def test_b18_other_sampling_parameters_than_the_leases_are_refused(leased):
    h, _, rewardd, lease = leased
    import msgspec

    other = msgspec.structs.replace(lease.sampling, temperature=0.7)
    assert "temperature 0.7 instead of 1.0" in refused(h, rewardd, *answer(lease, 0, sampling=other))


def test_b41_an_aborted_answer_is_never_trained(leased):
    h, _, rewardd, lease = leased
    assert "unfinished" in refused(h, rewardd, *answer(lease, 0, finish_reason="aborted"))
    assert h.summary()["in_flight"] == h.summary()["issued"]


def test_b38_duplicates_unknown_and_late_attempts_count_once(leased):
    h, generator, rewardd, lease = leased
    assert h.ask(rewardd, *answer(lease, 0)).status == "accepted"
    assert h.ask(rewardd, *answer(lease, 0, score=0.0)).status == "duplicate"
    assert h.ask(rewardd, *answer(lease, 7)).status == "unknown"
    stranger = m.Lease(**{f: getattr(lease, f) for f in lease.__struct_fields__} | {"group_id": 10_000})
    assert h.ask(rewardd, *answer(stranger, 0)).status == "unknown"
    h.ask(generator, m.HandBack(group_id=lease.group_id, attempt=1, slots=[1], reason="draining"))
    second = next(x for x in h.lease(generator) if x.group_id == lease.group_id)
    assert second.attempt == 2
    assert h.ask(rewardd, *answer(lease, 1)).status == "accepted"  # the first attempt finished after all
    assert h.ask(rewardd, *answer(second, 1)).status == "duplicate"
    cancelled = h.ask(generator, m.Heartbeat(state="serving")).cancel
    assert [(c.group_id, c.slot, c.attempt) for c in cancelled] == [(lease.group_id, 1, 2)]


def test_b23_unjudged_is_retried_then_retired_and_never_trained(build):
    h = build(**{"coordinator.max_attempts": 2})
    generator, rewardd = h.join("generator", "g"), h.join("rewardd", "r")
    for _ in range(2):
        lease = next(x for x in h.lease(generator) if 0 in x.slots and x.group_id == 1)
        assert h.ask(rewardd, *answer(lease, 0, kind="unjudged")).status == "accepted"
    summary = h.summary()
    assert summary["retired"] == 2 and summary["balanced"]
    assert h.store.connection.execute("SELECT COUNT(*) FROM prompts").fetchone() == (0,)  # not the prompt's fault


def test_b39_a_prompt_that_never_completes_is_retired_replaced_and_quarantined(build):
    h = build(1, **{"coordinator.max_attempts": 1, "data.max_prompt_failures": 2, "run.max_passes": 5})
    generator = h.join("generator", "g")
    for expected in ("retired", "quarantined"):
        h.lease(generator, 2)
        h.now += 11.0
        h.turn()
        states = [r[0] for r in h.store.connection.execute("SELECT state FROM groups ORDER BY group_id")]
        assert states[-1] == expected
    h.crash()
    generator = h.join("generator", "g")
    assert h.lease(generator) == []  # not drawn again after a restart either
    assert h.summary() == {
        "issued": 4,
        "trained": 0,
        "filtered": 0,
        "retired": 2,
        "quarantined": 2,
        "reissued": 0,
        "in_flight": 0,
        "balanced": True,
    }


def test_b72_groups_without_signal_are_filtered_and_refilled_up_to_a_limit(build):
    h = build(
        40, **{"algorithm.filter_groups": "equal_rewards", "algorithm.max_filtered_in_a_row": 6, "run.max_updates": 1}
    )
    generator, rewardd, trainer = h.join("generator", "g"), h.join("rewardd", "r"), h.join("trainer", "t")
    for _ in range(20):
        for lease in h.lease(generator):
            for slot in lease.slots:
                h.ask(rewardd, *answer(lease, slot, score=0.0))
    assert h.summary()["filtered"] == 12  # six groups, then the alarm, and the next groups are trained
    assert any("filtered" in alarm for alarm in h.coordinator.status().alarms)
    h.update(trainer, version=0)
    assert h.summary()["trained"] == 4


def test_versions_of_tool_tokens_are_not_judged(leased):
    h, _, rewardd, lease = leased
    body, arrays = answer(lease, 0)
    arrays["loss_mask"][2], arrays["versions"][2], arrays["logp_behaviour"][2] = 0, -1, np.nan
    assert h.ask(rewardd, body, arrays).status == "accepted"


def test_another_prompt_than_the_leased_one_is_refused(leased):
    h, _, rewardd, lease = leased
    body, arrays = answer(lease, 0)
    arrays["token_ids"][0] += 1
    assert refused(h, rewardd, body, arrays).startswith("prompt")
