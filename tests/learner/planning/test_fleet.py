"""The planner on the real coordinator's rules: who waits for whom follows from the rates."""

from dataclasses import replace

import pytest

from learner.coordinator.simulation import simulate
from learner.planning import Workload, predict, recommend
from learner.planning.fleet import NUM_UPDATES, calibrated, rewardd_for, setup_of

LOAD = Workload(
    groups_per_batch=4,
    group_size=4,
    lengths=(40, 60, 80, 100),
    num_slots=16,
    generator_tokens_per_s=160.0,
    update_s=4.0,
    publish_s=0.5,
)
"""A batch of 16 answers of 70 tokens: 7 s on one generator, 4 s in the learner."""


def test_generation_bound_run_takes_as_long_as_its_generators_need():
    found = predict(LOAD, num_generators=1, max_staleness=2)
    assert found.seconds_per_update == pytest.approx(LOAD.generation_s, rel=0.2)
    assert found.learner_idle == pytest.approx(1.0 - LOAD.update_s / found.seconds_per_update, abs=0.06)
    assert found.generator_idle < 0.1


def test_training_bound_run_takes_as_long_as_its_updates_and_generators_wait():
    fast = replace(LOAD, generator_tokens_per_s=640.0)
    found = predict(fast, num_generators=1, max_staleness=2)
    assert found.seconds_per_update == pytest.approx(LOAD.update_s, rel=0.1)
    assert found.learner_idle < 0.1
    assert found.generator_idle > 0.2


def test_answers_longer_than_the_bound_allows_hold_the_learner_whatever_the_number_of_generators():
    found = predict(LOAD, num_generators=8, max_staleness=0)
    slowest_answer_s = max(LOAD.lengths) * LOAD.num_slots / LOAD.generator_tokens_per_s
    assert found.seconds_per_update >= LOAD.update_s + slowest_answer_s


def test_synchronous_run_takes_both_one_after_the_other():
    found = predict(LOAD, num_generators=2, max_staleness=0)
    assert found.seconds_per_update > LOAD.update_s + LOAD.publish_s + 0.5 * LOAD.generation_s
    assert found.stale_share == 0.0


def test_slow_reward_daemon_holds_the_run_until_there_are_enough():
    slow = replace(LOAD, rewardd_answers_per_s=1.0, generator_tokens_per_s=1600.0)
    one = predict(slow, num_generators=1, max_staleness=2, num_rewardd=1)
    assert one.seconds_per_update == pytest.approx(16.0, rel=0.1)
    assert rewardd_for(slow) == 6
    enough = predict(slow, num_generators=1, max_staleness=2, num_rewardd=rewardd_for(slow))
    assert enough.seconds_per_update == pytest.approx(slow.update_s, rel=0.1)


def test_recommendation_is_the_fewest_generators_near_the_fastest():
    plan = recommend(LOAD, staleness=(0, 1, 2))
    fastest = min(p.seconds_per_update for p in plan.predictions)
    assert plan.chosen.seconds_per_update <= 1.05 * fastest
    fewer = [p for p in plan.predictions if p.num_generators < plan.chosen.num_generators]
    assert fewer and all(p.seconds_per_update > 1.05 * fastest for p in fewer)
    assert plan.chosen.max_staleness > 0 and plan.num_rewardd == 1


def test_large_batches_are_simulated_in_proportion():
    small = replace(LOAD, groups_per_batch=128, num_slots=128, generator_tokens_per_s=1280.0, update_s=32.0)
    large = replace(
        small, groups_per_batch=512, num_slots=512, generator_tokens_per_s=5120.0, rewardd_answers_per_s=0.0
    )
    found = [predict(load, num_generators=1, max_staleness=1, num_updates=8) for load in (small, large)]
    assert found[0].seconds_per_update == pytest.approx(found[1].seconds_per_update, rel=0.05)


def test_calibration_finds_the_rate_that_a_run_was_simulated_with():
    engine = replace(LOAD, fixed_share=0.2)
    guess = replace(engine, generator_tokens_per_s=400.0)
    result = simulate(setup_of(engine, num_generators=1, max_staleness=1, num_rewardd=1, num_updates=NUM_UPDATES))
    seen = result.generated_tokens / result.slot_seconds
    found = calibrated(guess, slot_tokens_per_s=seen, num_generators=1, max_staleness=1)
    assert found.generator_tokens_per_s == pytest.approx(engine.generator_tokens_per_s, rel=0.1)
