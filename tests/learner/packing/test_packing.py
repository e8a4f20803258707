import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.packing import ModelShape, forward_flops, pack, training_flops
from tests.benchmarks.bench_packing import CAP, SHAPE, count_cap_violations, lognormal_lengths


def square(length: int) -> float:
    return float(length + length * length)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int]:
    cap = draw(st.integers(1, 64))
    lengths = draw(st.lists(st.integers(1, cap), min_size=1, max_size=40))
    return lengths, cap, draw(st.integers(1, 9))


@settings(max_examples=300, deadline=None)
@given(problems())
def test_every_sequence_once_under_the_cap_and_equal_counts(problem: tuple[list[int], int, int]) -> None:
    lengths, cap, num_ranks = problem
    plan = pack(lengths, max_tokens=cap, num_ranks=num_ranks, flops=square)
    flat = [m for rank in plan.micro_batches for m in rank]
    assert sorted(i for m in flat for i in m) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in m) <= cap for m in flat)
    assert len(plan.micro_batches) == num_ranks
    assert {len(rank) for rank in plan.micro_batches} == {plan.num_slots}
    assert plan.num_dummies == sum(
        plan.is_dummy(rank=r, slot=s) for r in range(num_ranks) for s in range(plan.num_slots)
    )
    assert plan.num_dummies < num_ranks
    if plan.num_dummies:
        assert plan.num_slots * num_ranks > len(lengths)
    assert plan.tokens == tuple(tuple(sum(lengths[i] for i in m) for m in rank) for rank in plan.micro_batches)
    assert 0 < plan.fill_fraction <= 1
    assert plan.flops_imbalance >= 1 - 1e-9
    assert plan.lockstep_imbalance >= plan.flops_imbalance - 1e-9


@given(problems())
def test_plan_is_deterministic(problem: tuple[list[int], int, int]) -> None:
    lengths, cap, num_ranks = problem
    assert pack(lengths, max_tokens=cap, num_ranks=num_ranks, flops=square) == pack(
        lengths, max_tokens=cap, num_ranks=num_ranks, flops=square
    )


def test_cap_holds_in_random_and_adversarial_batches() -> None:
    assert count_cap_violations(1000) == 0


def test_eight_sequences_of_seven_under_a_cap_of_eight() -> None:
    plan = pack([7] * 8, max_tokens=8, num_ranks=1, flops=square)
    assert plan.num_slots == 8
    assert max(plan.tokens[0]) == 7


def test_b05_fewer_sequences_than_ranks_gives_marked_dummies() -> None:
    plan = pack([5, 3], max_tokens=8, num_ranks=4, flops=square)
    assert plan.num_slots == 1
    assert plan.num_dummies == 2
    assert sorted(plan.is_dummy(rank=rank, slot=0) for rank in range(4)) == [False, False, True, True]


def test_micro_batches_are_split_before_dummies_are_made() -> None:
    plan = pack([1, 1, 1, 1], max_tokens=8, num_ranks=4, flops=square)
    assert plan.num_dummies == 0


def test_fill_and_balance_on_lognormal_lengths() -> None:
    for seed in range(3):
        lengths = lognormal_lengths(np.random.default_rng(seed), num=4096, cap=CAP)
        plan = pack(lengths, max_tokens=CAP, num_ranks=8, flops=SHAPE)
        assert plan.fill_fraction >= 0.97
        assert plan.flops_imbalance <= 1.05
        assert plan.lockstep_imbalance <= 1.05


def test_small_batches_are_balanced_by_exchanging_sequences() -> None:
    lengths = lognormal_lengths(np.random.default_rng(7), num=128, cap=CAP, sigma=0.5)
    plan = pack(lengths, max_tokens=CAP, num_ranks=8, flops=SHAPE)
    assert plan.flops_imbalance <= 1.05


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "message"),
    [
        ([4, 9, 2], 1, "sequence 1 has 9 tokens but a micro-batch holds 8"),
        ([], 1, "no sequences to pack"),
        ([3, 0], 1, "sequence 1 has 0 tokens"),
        ([3], 0, "num_ranks must be at least 1"),
    ],
)
def test_refusals_name_the_numbers(lengths: list[int], num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(lengths, max_tokens=8, num_ranks=num_ranks, flops=square)


def test_flops_formula_counts_matmuls_and_causal_attention() -> None:
    shape = ModelShape(num_layers=2, num_heads=3, head_dim=4, num_matmul_params=1000)
    assert forward_flops([10], shape=shape)[0] == 2 * 1000 * 10 + 2 * (2 * 3 * 4) * 100
    assert training_flops([10], shape=shape)[0] == 3 * forward_flops([10], shape=shape)[0]
    with pytest.raises(ValueError, match="num_layers must be positive"):
        ModelShape(num_layers=0, num_heads=3, head_dim=4, num_matmul_params=1000)


def test_model_shape_counts_a_real_model() -> None:
    embedding = 152_064 * 3584
    assert abs(SHAPE.num_matmul_params + embedding - 7.6e9) < 0.05e9
