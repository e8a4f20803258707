import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.gae import Moments, gae, vtrace, whiten
from learner.algorithms.shaping import token_rewards
from tests.learner.algorithms import naive


def make(seed: int, *, num_seqs: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    seq_id = np.repeat(np.arange(num_seqs), rng.integers(1, 9, num_seqs))
    mask = rng.random(seq_id.size) < 0.7
    return {
        "reward_T": rng.standard_normal(seq_id.size),
        "value_T": rng.standard_normal(seq_id.size),
        "log_rho_T": rng.standard_normal(seq_id.size) * rng.choice([0.03, 1.0], seq_id.size),
        "action_mask_T": mask,
        "seq_id_T": seq_id,
    }


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_matches_the_definition(seed: int, gamma: float, lam: float) -> None:
    batch = make(seed)
    del batch["log_rho_T"]
    actual = gae(**batch, gamma=gamma, lam=lam)
    adv, ret = naive.gae(*batch.values(), gamma, lam)
    np.testing.assert_allclose(actual.adv_T, adv, atol=1e-12)
    np.testing.assert_allclose(actual.return_T, ret, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([0.95, 1.0]),
    rho_bar=st.sampled_from([1.0, 2.0]),
)
def test_vtrace_matches_the_definition(seed: int, gamma: float, lam: float, rho_bar: float) -> None:
    batch = make(seed)
    actual = vtrace(**batch, gamma=gamma, lam=lam, rho_bar=rho_bar)
    adv, target = naive.vtrace(*batch.values(), gamma, lam, rho_bar, 1.0, 0.05)
    np.testing.assert_allclose(actual.adv_T, adv, atol=1e-12)
    np.testing.assert_allclose(actual.return_T, target, atol=1e-12)


def test_vtrace_equals_gae_when_only_engine_noise_separates_the_policies() -> None:
    batch = make(3) | {"log_rho_T": np.full(make(3)["seq_id_T"].size, -0.04)}
    trace = vtrace(**batch, gamma=0.99, lam=0.9)
    del batch["log_rho_T"]
    plain = gae(**batch, gamma=0.99, lam=0.9)
    np.testing.assert_allclose(trace.adv_T, plain.adv_T)
    np.testing.assert_allclose(trace.return_T, plain.return_T)


def test_a_long_trace_is_not_cut_by_engine_noise() -> None:
    num = 4000
    reward_T = np.zeros(num)
    reward_T[-1] = 1.0
    arguments = {
        "reward_T": reward_T,
        "value_T": np.zeros(num),
        "log_rho_T": np.random.default_rng(0).normal(0, 0.01, num),
        "action_mask_T": np.ones(num, dtype=bool),
        "seq_id_T": np.zeros(num, dtype=np.int64),
    }
    assert vtrace(**arguments).return_T[0] == 1.0
    assert vtrace(**arguments, dead_band=0.0).return_T[0] < 0.01


def test_vtrace_is_finite_for_a_gap_of_a_thousand_nats() -> None:
    batch = make(0)
    batch["log_rho_T"][::2] = 1000.0
    batch["log_rho_T"][1::2] = -1000.0
    actual = vtrace(**batch)
    assert np.isfinite(actual.adv_T).all() and np.isfinite(actual.return_T).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_b09_padding_changes_nothing(side: str, poison: float) -> None:
    rng = np.random.default_rng(1)
    num = 6
    reward_T, value_T, log_rho_T = rng.standard_normal((3, num))
    bare = {"action_mask_T": np.ones(num, dtype=bool), "seq_id_T": np.zeros(num, dtype=np.int64)}
    left, right = (3 if side != "right" else 0), (4 if side != "left" else 0)

    def pad(x: np.ndarray, fill: float) -> np.ndarray:
        return np.concatenate([np.full(left, fill), x, np.full(right, fill)])

    padded = {
        "action_mask_T": pad(bare["action_mask_T"], 0).astype(bool),
        "seq_id_T": np.zeros(left + num + right, dtype=np.int64),
    }
    inside = slice(left, left + num)
    for estimate, extra in ((gae, {}), (vtrace, {"log_rho_T": log_rho_T})):
        expected = estimate(reward_T=reward_T, value_T=value_T, **extra, **bare, gamma=0.9, lam=0.8)
        actual = estimate(
            reward_T=pad(reward_T, poison),
            value_T=pad(value_T, poison),
            **{name: pad(x, poison) for name, x in extra.items()},
            **padded,
            gamma=0.9,
            lam=0.8,
        )
        assert np.array_equal(actual.adv_T[inside], expected.adv_T)
        assert np.array_equal(actual.return_T[inside], expected.return_T)
        assert actual.adv_T.sum() == pytest.approx(expected.adv_T.sum())


def test_tool_text_in_the_middle_is_skipped() -> None:
    mask = np.array([True, True, False, False, True])
    reward_T = token_rewards([2.0], action_mask_T=mask, seq_id_T=np.zeros(5, dtype=np.int64))
    value_T = np.array([0.1, 0.2, 99.0, 99.0, 0.3])
    seq_id_T = np.zeros(5, dtype=np.int64)
    full = gae(reward_T=reward_T, value_T=value_T, action_mask_T=mask, seq_id_T=seq_id_T, gamma=0.9, lam=0.8)
    short = gae(
        reward_T=reward_T[mask],
        value_T=value_T[mask],
        action_mask_T=np.ones(3, dtype=bool),
        seq_id_T=np.zeros(3, dtype=np.int64),
        gamma=0.9,
        lam=0.8,
    )
    np.testing.assert_allclose(full.adv_T[mask], short.adv_T)


def test_b03_unmasked_non_finite_value_names_the_trajectory() -> None:
    batch = make(0, num_seqs=2) | {"action_mask_T": np.ones(make(0, num_seqs=2)["seq_id_T"].size, dtype=bool)}
    batch["value_T"][-1] = np.nan
    del batch["log_rho_T"]
    with pytest.raises(ValueError, match="value is nan at an action of trajectory g1/7"):
        gae(**batch, trajectory_ids=["g1/6", "g1/7"])


def test_no_actions_at_all() -> None:
    batch = make(0) | {"action_mask_T": np.zeros(make(0)["seq_id_T"].size, dtype=bool)}
    del batch["log_rho_T"]
    assert not gae(**batch).adv_T.any()


def test_whitening_with_joined_moments_equals_whitening_at_once() -> None:
    rng = np.random.default_rng(0)
    x, mask = rng.standard_normal(50) * 3 + 1, rng.random(50) < 0.6
    x[~mask] = np.nan
    whole = whiten(x, mask_T=mask)
    assert whole[mask].mean() == pytest.approx(0, abs=1e-12)
    assert whole[mask].std() == pytest.approx(1, abs=1e-5)
    assert (whole[~mask] == 0).all()
    moments = Moments.of(x[:20], mask[:20]) + Moments.of(x[20:], mask[20:])
    parts = [whiten(part, mask_T=m, moments=moments) for part, m in ((x[:20], mask[:20]), (x[20:], mask[20:]))]
    np.testing.assert_allclose(np.concatenate(parts), whole)


def test_whitening_equal_values_gives_zero() -> None:
    assert not whiten(np.full(4, 0.5), mask_T=np.ones(4, dtype=bool)).any()
    assert not whiten(np.ones(4), mask_T=np.zeros(4, dtype=bool)).any()
