"""Masked and per-sequence arithmetic on flat packed tokens.

Shapes: ``T`` tokens of a micro-batch (its sequences one after the other, no padding), ``S`` its sequences.
``seq_id_T`` (int64) says which sequence, 0..S-1, each token is of; ``mask_T`` (bool) which tokens are trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to +-20 before they are exponentiated: exp(20) = 4.9e8 still squares within float32."""


def masked(x_T: Tensor, mask_T: Tensor, *, fill: float = 0.0) -> Tensor:
    """``x_T`` in at least float32 with ``fill`` at masked positions, whatever they hold; their gradient is zero."""
    wide = x_T.float() if x_T.dtype in (torch.float16, torch.bfloat16) else x_T
    return torch.where(mask_T, wide, torch.full((), fill, dtype=wide.dtype, device=wide.device))


def masked_sum(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """Sum of the unmasked positions, 0-d; zero, and still connected to the graph, when there are none."""
    return masked(x_T, mask_T).sum()


def num_sequences(seq_id_T: Tensor) -> int:
    """S, one more than the largest sequence id."""
    return int(seq_id_T.max()) + 1 if seq_id_T.numel() else 0


def segment_sum(x_T: Tensor, mask_T: Tensor, seq_id_T: Tensor, *, num_seqs: int) -> Tensor:
    """Sum of the unmasked positions of each sequence, ``[S]``."""
    x_T = masked(x_T, mask_T)
    return torch.zeros(num_seqs, dtype=x_T.dtype, device=x_T.device).index_add(0, seq_id_T, x_T)


def segment_count(mask_T: Tensor, seq_id_T: Tensor, *, num_seqs: int) -> Tensor:
    """Unmasked positions of each sequence, ``[S]`` int64."""
    return torch.zeros(num_seqs, dtype=torch.int64, device=mask_T.device).index_add(0, seq_id_T, mask_T.long())


def segment_mean(x_T: Tensor, mask_T: Tensor, seq_id_T: Tensor, *, num_seqs: int) -> Tensor:
    """Mean of the unmasked positions of each sequence, ``[S]``; 0 for a sequence without any."""
    count_S = segment_count(mask_T, seq_id_T, num_seqs=num_seqs).clamp(min=1)
    return segment_sum(x_T, mask_T, seq_id_T, num_seqs=num_seqs) / count_S


def count_trained(mask_T: Tensor, seq_id_T: Tensor) -> tuple[int, int]:
    """Trained tokens, and sequences with at least one: what a rank adds to the global denominators."""
    count_S = segment_count(mask_T, seq_id_T, num_seqs=num_sequences(seq_id_T))
    return int(count_S.sum()), int((count_S > 0).sum())


def bounded_log_ratio(numerator_T: Tensor, denominator_T: Tensor, mask_T: Tensor) -> Tensor:
    """``numerator - denominator`` of log-probabilities cut to +-MAX_LOG_RATIO, ``[T]``; 0 at masked positions."""
    return (masked(numerator_T, mask_T) - masked(denominator_T, mask_T)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def require_finite(
    tensors: Mapping[str, Tensor | None],
    *,
    mask_T: Tensor,
    seq_id_T: Tensor,
    trajectory_ids: Sequence[str] | None = None,
) -> None:
    """Raise ValueError, naming the trajectory, at the first non-finite value in an unmasked position."""
    present = {name: x_T for name, x_T in tensors.items() if x_T is not None}
    if torch.stack([(x_T.isfinite() | ~mask_T).all() for x_T in present.values()]).all():
        return
    for name, x_T in present.items():
        bad_T = mask_T & ~x_T.isfinite()
        if bad_T.any():
            position = int(bad_T.nonzero()[0])
            sequence = int(seq_id_T[position])
            offset = position - int((seq_id_T == sequence).nonzero()[0])
            label = trajectory_ids[sequence] if trajectory_ids is not None else f"number {sequence} of the micro-batch"
            raise ValueError(
                f"{name} is {float(x_T[position].detach())} at token {offset} of trajectory {label} "
                f"({int(bad_T.sum())} such tokens): quarantine it, or mask those tokens"
            )
