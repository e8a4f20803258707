"""The critic's loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.algorithms.metrics import MetricSums
from learner.algorithms.tensors import masked, masked_sum, require_finite


def compute_value_loss(
    *,
    value_T: Tensor,
    old_value_T: Tensor,
    return_T: Tensor,
    mask_T: Tensor,
    seq_id_T: Tensor,
    clip: float,
    num_tokens_global: int,
    trajectory_ids: Sequence[str] | None = None,
) -> tuple[Tensor, MetricSums]:
    """This micro-batch's share of the clipped value loss (0-d, with gradient) and its metric sums.

    ``0.5 / num_tokens_global * sum_t max((v - R)^2, (clamp(v, v_old - clip, v_old + clip) - R)^2)``, as in PPO's
    reference implementation. All tensors ``[T]``; ``old_value_T`` is the critic's value at the start of the update.
    Shares and sums add up over micro-batches and ranks. Raises ValueError for a non-finite unmasked input.
    """
    if num_tokens_global < 1:
        raise ValueError(f"the batch trains {num_tokens_global} tokens: skip the critic's update")
    inputs = {"value": value_T, "old_value": old_value_T, "return": return_T}
    require_finite(inputs, mask_T=mask_T, seq_id_T=seq_id_T, trajectory_ids=trajectory_ids)
    value_T = masked(value_T, mask_T)
    old_T, return_T = masked(old_value_T.detach(), mask_T), masked(return_T.detach(), mask_T)
    old_T, return_T = old_T.to(value_T.dtype), return_T.to(value_T.dtype)
    plain_T = (value_T - return_T).square()
    clipped_T = (old_T + (value_T - old_T).clamp(-clip, clip) - return_T).square()
    loss = 0.5 * masked_sum(torch.maximum(plain_T, clipped_T), mask_T) / num_tokens_global

    with torch.no_grad():
        value, target = value_T.double(), return_T.double()
        sums = {
            "vf_loss": loss.detach().double(),
            "vf_tokens": mask_T.sum().double(),
            "vf_updates": mask_T.sum().double() / num_tokens_global,
            "vf_clipped": masked_sum((clipped_T > plain_T).double(), mask_T),
            "vpred": value.sum(),
            "return": target.sum(),
            "return_square": target.square().sum(),
            "residual": (target - value).sum(),
            "residual_square": (target - value).square().sum(),
        }
    return loss, sums
