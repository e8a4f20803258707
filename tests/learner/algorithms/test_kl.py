import numpy as np
import pytest
import torch

from learner.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate
from tests.learner.algorithms import naive
from tests.learner.algorithms.batches import make_batch


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_match_the_naive_reference(estimator: str, straight_through: bool) -> None:
    batch = make_batch(0, scale=8.0)
    kl_T = kl_estimate(
        logp_T=batch.logp_T,
        ref_logp_T=batch.ref_logp_T,
        mask_T=batch.mask_T,
        estimator=estimator,  # type: ignore[arg-type]
        straight_through=straight_through,
    )
    b = batch.numpy()
    expected = [
        naive.kl(x, y, estimator) if m else 0.0 for x, y, m in zip(b["logp"], b["ref_logp"], b["mask"], strict=True)
    ]
    np.testing.assert_allclose(kl_T.numpy(), expected, rtol=1e-12)


def test_straight_through_has_the_gradient_of_k2() -> None:
    logp_T = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref_T = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    mask_T = torch.ones(2, dtype=torch.bool)
    for estimator in ("k1", "k3"):
        kl_T = kl_estimate(logp_T=logp_T, ref_logp_T=ref_T, mask_T=mask_T, estimator=estimator, straight_through=True)
        (grad_T,) = torch.autograd.grad(kl_T.sum(), logp_T)
        torch.testing.assert_close(grad_T, (logp_T - ref_T).detach())


def test_unknown_estimator_is_refused() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_estimate(logp_T=one, ref_logp_T=one, mask_T=one.bool(), estimator="k4")  # type: ignore[arg-type]


def test_adaptive_controller_follows_the_formula_and_is_bounded() -> None:
    controller = AdaptiveKL(value=0.1, target=0.1, horizon=1000)
    assert controller.update(kl=0.11, num_seqs=100) == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    controller = AdaptiveKL(value=0.1, target=0.1, horizon=1000)
    assert controller.update(kl=100.0, num_seqs=100) == pytest.approx(0.1 * 1.02)
    assert controller.update(kl=-5.0, num_seqs=100_000) == 0.0  # never negative


def test_controllers_resume_from_their_state() -> None:
    controller = AdaptiveKL(value=0.1, target=0.1, horizon=1000)
    controller.update(kl=0.2, num_seqs=64)
    resumed = AdaptiveKL(value=0.1, target=0.1, horizon=1000)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.update(kl=0.2, num_seqs=64) == controller.update(kl=0.2, num_seqs=64)
    fixed = FixedKL(0.5)
    assert fixed.update(kl=9.0, num_seqs=10) == 0.5
    fixed.load_state_dict({"value": 0.25})
    assert fixed.state_dict() == {"value": 0.25}


def test_adaptive_controller_refuses_a_useless_target() -> None:
    with pytest.raises(ValueError, match="target > 0"):
        AdaptiveKL(value=0.1, target=0.0, horizon=10)
