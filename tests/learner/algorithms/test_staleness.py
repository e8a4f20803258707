from dataclasses import replace

import pytest
import torch

from learner.algorithms.metrics import add_metric_sums, finalize_metrics, sequence_metric_sums
from learner.algorithms.policy_loss import LossConfig
from learner.algorithms.staleness import staleness_mask
from learner.algorithms.tensors import count_trained
from tests.learner.algorithms.batches import loss_and_grad, make_batch


def test_tokens_older_than_the_bound_leave_the_mask_and_are_counted() -> None:
    version_T = torch.tensor([7, 8, 9, 10, 5, 11])
    mask_T = torch.tensor([True, True, True, True, False, True])
    kept_T, sums = staleness_mask(version_T, trained_version=10, max_staleness=2, mask_T=mask_T)
    assert kept_T.tolist() == [False, True, True, True, False, True]
    metrics = finalize_metrics(sums)
    assert metrics["staleness/masked_share"] == 0.2
    assert metrics["staleness/age_mean"] == pytest.approx((3 + 2 + 1 + 0 + 0) / 5)
    shares = {name: metrics[f"staleness/age_share/{name}"] for name in ("0", "1", "2", "over")}
    assert shares == {"0": 0.4, "1": 0.2, "2": 0.2, "over": 0.2}


def test_eta_zero_trains_only_the_current_version() -> None:
    kept_T, _ = staleness_mask(
        torch.tensor([3, 4]), trained_version=4, max_staleness=0, mask_T=torch.ones(2, dtype=torch.bool)
    )
    assert kept_T.tolist() == [False, True]
    with pytest.raises(ValueError, match="max_staleness must be at least 0"):
        staleness_mask(kept_T, trained_version=4, max_staleness=-1, mask_T=kept_T)


def test_stale_tokens_leave_numerator_and_denominator() -> None:
    batch = make_batch(0)
    version_T = torch.where(batch.seq_id_T == 1, 3, 5)
    kept_T, _ = staleness_mask(version_T, trained_version=5, max_staleness=1, mask_T=batch.mask_T)
    stale = loss_and_grad(replace(batch, mask_T=kept_T), LossConfig())
    without = batch.select([0, 2, 3, 4])
    expected = loss_and_grad(without, LossConfig(), counts=count_trained(kept_T, batch.seq_id_T))
    torch.testing.assert_close(stale[0], expected[0])
    assert int(kept_T.sum()) == count_trained(without.mask_T, without.seq_id_T)[0]


def test_sequence_metrics_add_up() -> None:
    first = sequence_metric_sums(
        score_S=torch.tensor([1.0, 0.0]), length_S=torch.tensor([10, 20]), truncated_S=torch.tensor([False, True])
    )
    second = sequence_metric_sums(
        score_S=torch.tensor([1.0]), length_S=torch.tensor([30]), truncated_S=torch.tensor([False])
    )
    metrics = finalize_metrics(add_metric_sums(first, second))
    assert metrics == pytest.approx(
        {"critic/score/mean": 2 / 3, "response_length/mean": 20.0, "response_length/cut_share": 1 / 3}
    )
