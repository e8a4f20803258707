import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.advantages import ADVANTAGES, AdvantageOptions, compute_advantages
from tests.learner.algorithms import naive

REFERENCES = {
    "grpo": naive.grpo,
    "dr_grpo": naive.dr_grpo,
    "rloo": naive.rloo,
    "opo": naive.opo,
    "reinforce_pp": naive.reinforce_pp,
    "reinforce_pp_baseline": naive.reinforce_pp_baseline,
}


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[float], list[int], list[int]]:
    num = draw(st.integers(2, 12))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0, 0.1]), min_size=num, max_size=num))
    groups = draw(st.lists(st.integers(0, 3), min_size=num, max_size=num))
    lengths = draw(st.lists(st.integers(1, 9), min_size=num, max_size=num))
    return rewards, groups, lengths


@pytest.mark.parametrize("name", sorted(REFERENCES))
@settings(deadline=None)
@given(batch=batches())
def test_estimators_match_the_naive_reference(name: str, batch: tuple[list[float], list[int], list[int]]) -> None:
    rewards, groups, lengths = batch
    actual = compute_advantages(name, reward_S=rewards, group_S=groups, length_S=lengths)
    np.testing.assert_allclose(actual, REFERENCES[name](rewards, groups, lengths), rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(rewards=st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0]), min_size=3, max_size=7), k=st.integers(2, 3))
def test_passk_matches_all_choices_of_the_others(rewards: list[float], k: int) -> None:
    groups = [4] * len(rewards)
    for passk_k in (0, k):
        actual = compute_advantages(
            "grpo_passk",
            reward_S=rewards,
            group_S=groups,
            length_S=groups,
            options=AdvantageOptions(passk_k=passk_k),
        )
        np.testing.assert_allclose(actual, naive.passk(rewards, groups, passk_k), atol=1e-12)


def test_passk_of_the_whole_group_is_best_minus_second_best_to_the_best() -> None:
    actual = compute_advantages("grpo_passk", reward_S=[0.1, 0.9, 0.4], group_S=[0, 0, 0], length_S=[1, 1, 1])
    np.testing.assert_allclose(actual, [0.0, 0.5, 0.0])


def test_remax_subtracts_the_greedy_reward_and_refuses_a_missing_one() -> None:
    def run(baseline: dict[int, float] | None) -> np.ndarray:
        options = AdvantageOptions(baseline_reward=baseline)
        return compute_advantages("remax", reward_S=[1.0, 0.0], group_S=[7, 8], length_S=[1, 1], options=options)

    np.testing.assert_allclose(run({7: 0.25, 8: 1.0}), [0.75, -1.0])
    with pytest.raises(ValueError, match="no baseline reward for group 8"):
        run({7: 0.25})
    with pytest.raises(ValueError, match="needs baseline_reward"):
        run(None)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"remax", "reinforce_pp"}))
def test_a_group_of_one_or_without_signal_has_advantage_zero(name: str) -> None:
    actual = compute_advantages(name, reward_S=[1.0, 0.1, 0.1, 0.1], group_S=[0, 1, 1, 1], length_S=[5, 6, 7, 8])
    assert (actual == 0).all()


def test_dividing_by_the_deviation_is_optional() -> None:
    arguments = {"reward_S": [1.0, 0.0, 0.0], "group_S": [0, 0, 0], "length_S": [1, 1, 1]}
    off = compute_advantages("grpo", **arguments, options=AdvantageOptions(norm_by_std=False))
    np.testing.assert_allclose(off, compute_advantages("dr_grpo", **arguments))
    assert compute_advantages("grpo", **arguments)[0] > off[0]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="unknown advantage 'gpro'"):
        compute_advantages("gpro", reward_S=[1.0], group_S=[0], length_S=[1])
    with pytest.raises(ValueError, match=r"reward of sequence 1 \(group 5\) is nan"):
        compute_advantages("grpo", reward_S=[1.0, np.nan], group_S=[5, 5], length_S=[1, 1])
    with pytest.raises(ValueError, match="must be equal"):
        compute_advantages("grpo", reward_S=[1.0], group_S=[0, 0], length_S=[1])
    with pytest.raises(ValueError, match="passk_k must be at least 2"):
        options = AdvantageOptions(passk_k=1)
        compute_advantages("grpo_passk", reward_S=[1.0, 0.0], group_S=[3, 3], length_S=[1, 1], options=options)


def test_passk_of_a_group_with_fewer_answers_uses_its_size() -> None:
    arguments = {"reward_S": [1.0, 0.25], "group_S": [3, 3], "length_S": [1, 1]}
    actual = compute_advantages("grpo_passk", **arguments, options=AdvantageOptions(passk_k=5))
    np.testing.assert_allclose(actual, [0.75, 0.0])
