"""The staleness bound at consumption: older tokens stay actions but are not trained."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.metrics import MetricSums
from learner.algorithms.tensors import masked_sum


def staleness_mask(
    version_T: Tensor, *, trained_version: int, max_staleness: int, mask_T: Tensor
) -> tuple[Tensor, MetricSums]:
    """``mask_T`` without the tokens sampled before version ``trained_version - max_staleness``, and counts.

    ``version_T`` int64 ``[T]``: the policy version that sampled each token. ``trained_version``: the version that
    this update starts from, so with ``max_staleness`` 0 only its own tokens are trained. A token that leaves the mask
    leaves the loss's numerator and denominator (count the denominators after this); it stays an action for
    advantages, returns, baselines and lengths. Tokens of a version ahead of the trained one (a batch trained again
    after a resume) count as age 0.

    The counts, 0-d float64 and additive over micro-batches and ranks, are those of ``finalize_metrics``:
    ``staleness/masked_share``, ``staleness/age_mean`` and the histogram ``staleness/age_share/<0..eta|over>``.
    """
    if max_staleness < 0:
        raise ValueError(f"max_staleness must be at least 0, got {max_staleness}")
    age_T = (trained_version - version_T).clamp(min=0)
    fresh_T = age_T <= max_staleness
    sums = {
        "sampled_tokens": mask_T.sum().double(),
        "stale_tokens": (mask_T & ~fresh_T).sum().double(),
        "age": masked_sum(age_T.double(), mask_T),
    }
    for age in range(max_staleness + 1):
        sums[f"age/{age}"] = (mask_T & (age_T == age)).sum().double()
    sums["age/over"] = sums["stale_tokens"]
    return torch.logical_and(mask_T, fresh_T), sums
