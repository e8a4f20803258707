"""From per-token losses to one number, with the counts of the whole batch as denominators.

Each function returns this micro-batch's share: the sum of the shares over the micro-batches of all ranks is the loss
of the batch, however the batch was split. (A framework that averages gradients over ranks, as DeepSpeed does, needs
the share times the number of ranks.) The counts are of trained tokens and of sequences with at least one, after
masks and before rejection: a rejected token leaves the numerator only.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from learner.algorithms.tensors import masked_sum, num_sequences, segment_mean


class Aggregation(Protocol):
    """The signature that all aggregations share."""

    def __call__(
        self,
        loss_T: Tensor,
        *,
        mask_T: Tensor,
        seq_id_T: Tensor,
        num_tokens_global: int,
        num_seqs_global: int,
        sum_constant: float | None = None,
    ) -> Tensor: ...


def token_mean(
    loss_T: Tensor,
    *,
    mask_T: Tensor,
    seq_id_T: Tensor,
    num_tokens_global: int,
    num_seqs_global: int,
    sum_constant: float | None = None,
) -> Tensor:
    """``sum_t loss_t / num_tokens_global``: every token of the batch weighs the same (DAPO, arXiv 2503.14476)."""
    return masked_sum(loss_T, mask_T) / num_tokens_global


def seq_mean_token_mean(
    loss_T: Tensor,
    *,
    mask_T: Tensor,
    seq_id_T: Tensor,
    num_tokens_global: int,
    num_seqs_global: int,
    sum_constant: float | None = None,
) -> Tensor:
    """``sum_s (mean_t loss_st) / num_seqs_global``: every sequence weighs the same (GRPO, arXiv 2402.03300)."""
    per_seq_S = segment_mean(loss_T, mask_T, seq_id_T, num_seqs=num_sequences(seq_id_T))
    return per_seq_S.sum() / num_seqs_global


def seq_sum_over_constant(
    loss_T: Tensor,
    *,
    mask_T: Tensor,
    seq_id_T: Tensor,
    num_tokens_global: int,
    num_seqs_global: int,
    sum_constant: float | None = None,
) -> Tensor:
    """``sum_t loss_t / (sum_constant num_seqs_global)``, the constant a length limit (Dr.GRPO, arXiv 2503.20783)."""
    if sum_constant is None or not sum_constant > 0:
        raise ValueError(f"seq_sum_over_constant needs sum_constant > 0 (the longest answer), got {sum_constant}")
    return masked_sum(loss_T, mask_T) / (sum_constant * num_seqs_global)


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_sum_over_constant": seq_sum_over_constant,
}
