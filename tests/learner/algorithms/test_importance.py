import math

import numpy as np
import pytest
import torch

from learner.algorithms.importance import (
    BehaviourConfig,
    behaviour_weights,
    effective_sample_size,
    proximal_loglinear,
)
from tests.learner.algorithms import naive
from tests.learner.algorithms.batches import make_batch


def weight_of(rho: float, config: BehaviourConfig) -> float:
    one = torch.ones(1, dtype=torch.bool)
    weights = behaviour_weights(
        logp_T=torch.tensor([math.log(rho)]),
        logp_behaviour_T=torch.zeros(1),
        mask_T=one,
        seq_id_T=torch.zeros(1, dtype=torch.int64),
        config=config,
    )
    return float(weights.weight_T[0])


def test_bounds_are_on_rho_and_not_on_its_inverse() -> None:
    bounds = BehaviourConfig(mode="mask", low=0.6, high=1.4)
    assert [weight_of(rho, bounds) > 0 for rho in (0.59, 0.61, 1.39, 1.41, 1 / 0.61)] == [
        False,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "off"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_weights_match_the_naive_reference(level: str, mode: str) -> None:
    for seed in range(20):
        batch = make_batch(seed)
        b = batch.numpy()
        config = BehaviourConfig(level=level, mode=mode, low=0.7, high=1.5)  # type: ignore[arg-type]
        actual = behaviour_weights(
            logp_T=batch.logp_prox_T,
            logp_behaviour_T=batch.logp_behaviour_T,
            mask_T=batch.mask_T,
            seq_id_T=batch.seq_id_T,
            config=config,
        )
        expected = naive.weights(b["logp_prox"], b["logp_behaviour"], b["mask"], b["seq_id"], level, mode, 0.7, 1.5)
        np.testing.assert_allclose(actual.weight_T.numpy(), expected, rtol=1e-12)
        assert not (actual.capped_T & ~batch.mask_T).any()
        rho = naive.rho(b["logp_prox"], b["logp_behaviour"], b["mask"], b["seq_id"], level)
        outside = (rho > 1.5) | ((rho < 0.7) & (mode == "mask"))
        expected_capped = outside & b["mask"] & (level != "off")
        np.testing.assert_array_equal(actual.capped_T.numpy(), expected_capped)


def test_truncation_is_the_default_and_bounded_by_high() -> None:
    assert weight_of(1e6, BehaviourConfig()) == 2.0
    assert weight_of(0.1, BehaviourConfig()) == pytest.approx(0.1)


def test_effective_sample_size() -> None:
    mask_T = torch.tensor([True, True, True, True, False])
    assert effective_sample_size(torch.ones(5), mask_T=mask_T) == 1.0
    assert effective_sample_size(torch.tensor([1.0, 0, 0, 0, float("nan")]), mask_T=mask_T) == 0.25
    assert effective_sample_size(torch.zeros(5), mask_T=mask_T) == 0.0


def test_proximal_loglinear_interpolates_by_version() -> None:
    behaviour_T, current_T = torch.tensor([-4.0, -4.0, -4.0, -4.0]), torch.tensor([-2.0, -2.0, -2.0, -2.0])
    proximal_T = proximal_loglinear(
        logp_behaviour_T=behaviour_T,
        logp_current_T=current_T,
        version_proximal=9,
        version_behaviour_T=torch.tensor([6, 8, 9, 10]),
        version_current=10,
    )
    # alpha = 3/4, 1/2, 0 and, sampled by the current policy itself, 1
    torch.testing.assert_close(proximal_T, torch.tensor([-2.5, -3.0, -4.0, -2.0]))


def test_proximal_loglinear_carries_no_gradient() -> None:
    current_T = torch.tensor([-2.0], requires_grad=True)
    proximal_T = proximal_loglinear(
        logp_behaviour_T=torch.tensor([-4.0]),
        logp_current_T=current_T,
        version_proximal=1,
        version_behaviour_T=torch.tensor([0]),
        version_current=2,
    )
    assert not proximal_T.requires_grad
