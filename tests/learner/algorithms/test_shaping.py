import numpy as np
import pytest

from learner.algorithms.shaping import overlong_filter, soft_overlong_penalty, token_rewards


def test_soft_penalty_falls_linearly_over_the_buffer() -> None:
    actual = soft_overlong_penalty([10, 80, 90, 100, 120], max_length=100, buffer_tokens=20, penalty=0.5)
    np.testing.assert_allclose(actual, [0, 0, -0.25, -0.5, -0.5])


@pytest.mark.parametrize("buffer_tokens", [0, 101])
def test_soft_penalty_refuses_a_useless_buffer(buffer_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"got {buffer_tokens}"):
        soft_overlong_penalty([1], max_length=100, buffer_tokens=buffer_tokens)


def test_overlong_filter_takes_whole_answers_out_of_the_mask() -> None:
    mask = overlong_filter([True, False], seq_id_T=[0, 0, 1, 1], mask_T=[False, True, False, True])
    assert mask.tolist() == [False, False, False, True]


def test_score_lands_on_the_last_action_and_kl_on_each() -> None:
    reward_T = token_rewards(
        [1.0, 2.0],
        action_mask_T=[True, False, True, False, True, False],
        seq_id_T=[0, 0, 0, 1, 1, 1],
        kl_T=[0.5, np.nan, 1.0, np.inf, 2.0, np.nan],
        kl_coef=0.1,
    )
    np.testing.assert_allclose(reward_T, [-0.05, 0, 0.9, 0, 1.8, 0])


def test_a_sequence_without_an_action_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1 has no sampled token"):
        token_rewards([1.0, 2.0], action_mask_T=[True, False], seq_id_T=[0, 1])
