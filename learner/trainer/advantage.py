"""Advantages per token of a prepared batch: one number per sequence, or GAE and V-trace from a critic's values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from learner.algorithms.gae import Estimate, Moments, gae, vtrace, whiten
from learner.trainer.batch import MicroBatch
from learner.trainer.ranks import Ranks
from learner.trainer.reduce import sum_over_ranks
from learner.trainer.update import PreparedBatch
from protocol.config.learner import AlgorithmSection

ByMicroBatch = dict[int, torch.Tensor]
"""Tensors ``[T]`` by ``id`` of the micro-batch."""


def micro_batches(prepared: PreparedBatch) -> list[MicroBatch]:
    """All micro-batches of this rank."""
    return [micro_batch for mini in prepared.mini_batches for micro_batch in mini.micro_batches]


def spread(adv_S: np.ndarray, prepared: PreparedBatch, *, device: torch.device) -> ByMicroBatch:
    """A sequence's advantage at each of its tokens; ``adv_S`` is over the items of the batch."""
    spread_T = {}
    for micro_batch in micro_batches(prepared):
        own_S = adv_S[list(micro_batch.indices)] if micro_batch.indices else np.zeros(1)
        spread_T[id(micro_batch)] = torch.as_tensor(own_S, device=device).float()[micro_batch.seq_id_T]
    return spread_T


def sum_by_sequence(
    x: ByMicroBatch, prepared: PreparedBatch, *, num_seqs: int, ranks: Ranks, device: torch.device
) -> np.ndarray:
    """Sum over each sequence's tokens, ``[S]`` float64 over the items of the batch, over all ranks."""
    sum_S = torch.zeros(num_seqs, dtype=torch.float64, device=device)
    for micro_batch in micro_batches(prepared):
        if micro_batch.indices:
            owner_T = torch.tensor(micro_batch.indices, device=device)[micro_batch.seq_id_T]
            sum_S.index_add_(0, owner_T, x[id(micro_batch)].double())
    torch.distributed.all_reduce(sum_S, group=ranks.data_group)
    return sum_S.cpu().numpy()


@dataclass(frozen=True)
class CriticTargets:
    """Advantages and value targets by micro-batch, and their means and deviations over the trained tokens."""

    advantages: ByMicroBatch
    returns: ByMicroBatch
    metrics: dict[str, float]


def critic_targets(
    prepared: PreparedBatch,
    *,
    reward_S: np.ndarray,
    values: ByMicroBatch,
    token_penalty: ByMicroBatch,
    log_rho: ByMicroBatch,
    algorithm: AlgorithmSection,
    ranks: Ranks,
    device: torch.device,
) -> CriticTargets:
    """GAE, or V-trace where ``algorithm.vtrace`` asks for it; all ranks take part.

    The reward of an item comes at its last sampled token, ``token_penalty`` (the reference KL, already times its
    coefficient) is taken off at every one. Stale and excluded tokens are actions like any other. ``log_rho`` =
    log pi_proximal - log pi_behaviour, for V-trace alone. Where the critic's values are not finite, advantages are
    not: the loss drops the step then.
    """
    estimates: dict[int, Estimate] = {}
    moments = Moments(0.0, 0.0, 0.0)
    for micro_batch in micro_batches(prepared):
        key = id(micro_batch)
        estimates[key] = _estimate(
            micro_batch,
            reward_S=reward_S,
            value_T=values[key],
            penalty_T=token_penalty.get(key),
            log_rho_T=log_rho.get(key),
            algorithm=algorithm,
        )
        moments += Moments.of(np.nan_to_num(estimates[key].adv_T), micro_batch.mask_T.cpu().numpy())
    own = {"count": moments.count, "total": moments.total, "square": moments.square}
    moments = Moments(**sum_over_ranks(own, device=device, group=ranks.data_group))
    advantages, returns = {}, {}
    for micro_batch in micro_batches(prepared):
        key = id(micro_batch)
        adv_T = estimates[key].adv_T
        if algorithm.whiten_advantages:
            adv_T = whiten(adv_T, mask_T=micro_batch.mask_T.cpu().numpy(), moments=moments)
        advantages[key] = torch.as_tensor(adv_T, device=device).float()
        returns[key] = torch.as_tensor(estimates[key].return_T, device=device).float()
    metrics = {"critic/advantages/mean": moments.mean, "critic/advantages/std": moments.std}
    return CriticTargets(advantages=advantages, returns=returns, metrics=metrics)


def _estimate(
    micro_batch: MicroBatch,
    *,
    reward_S: np.ndarray,
    value_T: torch.Tensor,
    penalty_T: torch.Tensor | None,
    log_rho_T: torch.Tensor | None,
    algorithm: AlgorithmSection,
) -> Estimate:
    action_T = micro_batch.sampled_T.cpu().numpy()
    seq_id_T = micro_batch.seq_id_T.cpu().numpy()
    reward_T = np.zeros(len(action_T))
    for sequence, index in enumerate(micro_batch.indices):
        actions = np.flatnonzero(action_T & (seq_id_T == sequence))
        if actions.size:
            reward_T[actions[-1]] = reward_S[index]
    if penalty_T is not None:
        reward_T -= np.where(action_T, penalty_T.double().cpu().numpy(), 0.0)
    raw_T = value_T.double().cpu().numpy()
    inputs = {
        "reward_T": np.nan_to_num(reward_T),
        "value_T": np.nan_to_num(raw_T),
        "action_mask_T": action_T,
        "seq_id_T": seq_id_T,
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
    }
    if algorithm.vtrace:
        assert log_rho_T is not None
        estimate = vtrace(**inputs, log_rho_T=np.nan_to_num(log_rho_T.double().cpu().numpy()))
    else:
        estimate = gae(**inputs)
    if np.isfinite(raw_T[action_T]).all() and np.isfinite(reward_T).all():
        return estimate
    return Estimate(np.full_like(raw_T, np.nan), np.full_like(raw_T, np.nan))
