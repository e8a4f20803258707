"""Staleness and selection under stragglers, on the real coordinator with a simulated clock (B37, B39, B68)."""

from dataclasses import replace

import pytest

from learner.coordinator.simulation import Setup, SimulatedGenerator, simulate

FAST = SimulatedGenerator(slot_tokens_per_s=50.0, num_slots=16)
SLOW = SimulatedGenerator(slot_tokens_per_s=2.5, num_slots=16)


def test_a_generator_20_times_slower_makes_no_token_too_old():
    setup = Setup(
        generators=(FAST, FAST, FAST, SLOW),
        num_prompts=600,
        group_size=4,
        groups_per_batch=32,
        max_staleness=2,
        p99_over_median=4.0,
    )
    result = simulate(setup)
    assert result.max_trained_staleness == 2
    assert result.masked_share < 0.01
    assert result.num_moved_slots > 0
    assert result.ledger["balanced"] and result.ledger["trained"] == 2400


@pytest.mark.slow
def test_b68_trained_mix_is_the_drawn_mix_and_generators_are_busy():
    setup = Setup(
        generators=(FAST, FAST, FAST, SLOW),
        num_prompts=10_000,
        group_size=4,
        groups_per_batch=128,
        max_staleness=2,
        p99_over_median=20.0,
        max_response_tokens=8192,
        train_tokens_per_s=10_000.0,
    )
    result = simulate(setup)
    assert max(abs(a - b) for a, b in zip(result.drawn_share, result.trained_share, strict=True)) < 0.01
    assert max(result.idle) < 0.05
    assert max(result.slots_empty) < 0.05
    assert result.masked_share < 0.01
    assert result.max_trained_staleness <= 2
    assert result.ledger["balanced"] and result.ledger["in_flight"] == 0


def test_staleness_zero_is_synchronous():
    setup = Setup(generators=(FAST, FAST), num_prompts=64, groups_per_batch=8, max_staleness=0, p99_over_median=3.0)
    result = simulate(setup)
    assert result.max_trained_staleness == 0 and result.masked_tokens == 0
    assert result.ledger["trained"] == 256


def test_b37_fast_generators_are_slowed_instead_of_dropped():
    setup = Setup(
        generators=(FAST, FAST), num_prompts=200, groups_per_batch=8, p99_over_median=3.0, train_tokens_per_s=400.0
    )
    result = simulate(setup)
    assert result.lost_tokens == 0 and result.masked_share < 0.01
    assert result.trainer_idle < 0.1 < min(result.slots_empty)


def test_moving_slow_leases_pays():
    alone = Setup(generators=(FAST, FAST, FAST), num_prompts=1200, groups_per_batch=32, p99_over_median=4.0)
    with_straggler = simulate(replace(alone, generators=(FAST, FAST, FAST, SLOW)))
    assert with_straggler.seconds < 1.15 * simulate(alone).seconds
