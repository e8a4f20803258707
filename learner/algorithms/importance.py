"""Weights that correct for the behaviour policy being older than, or different from, the proximal one.

``rho = pi_proximal / pi_behaviour`` at the level of the token, of the sequence (product of its tokens) or of the
geometric mean of the sequence. Mode ``truncate`` takes ``min(rho, high)`` (truncated importance sampling, Espeholt et
al. 2018, arXiv 1802.01561); mode ``mask`` keeps ``rho`` inside ``[low, high]`` and rejects outside (weight 0). The
bounds are on rho itself, never on 1/rho. Weights carry no gradient. A rejected token leaves the numerator of the loss
and stays in its denominator, so that rejection never scales up the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.tensors import (
    MAX_LOG_RATIO,
    masked,
    num_sequences,
    segment_mean,
    segment_sum,
)

Level = Literal["token", "sequence", "geometric", "off"]


@dataclass(frozen=True)
class BehaviourConfig:
    """How rho becomes a weight. ``low`` is used by mode ``mask`` only; level ``off`` gives weight 1."""

    level: Level = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    high: float = 2.0
    low: float = 0.0

    def __post_init__(self) -> None:
        if self.level not in ("token", "sequence", "geometric", "off"):
            raise ValueError(f"behaviour.level must be token, sequence, geometric or off, got {self.level!r}")
        if self.mode not in ("truncate", "mask"):
            raise ValueError(f"behaviour.mode must be truncate or mask, got {self.mode!r}")
        if not 0 <= self.low < self.high:
            raise ValueError(f"behaviour needs 0 <= low < high, got low={self.low} high={self.high}")


@dataclass(frozen=True)
class BehaviourWeights:
    """``weight_T`` (0 where rejected or masked), ``rho_T`` before any bound, ``capped_T`` truncated or rejected."""

    weight_T: Tensor
    rho_T: Tensor
    capped_T: Tensor


@torch.no_grad()
def behaviour_weights(
    *, logp_T: Tensor, logp_behaviour_T: Tensor, mask_T: Tensor, seq_id_T: Tensor, config: BehaviourConfig
) -> BehaviourWeights:
    """Weight of each token, ``[T]``; ``logp_T`` is the numerator's log-probability, the proximal policy's as a rule.

    The sum of log-ratios of a sequence is cut to +-20 like that of a token, so every weight is finite.
    """
    raw_T = masked(logp_T, mask_T) - masked(logp_behaviour_T, mask_T)
    num_seqs = num_sequences(seq_id_T)
    if config.level == "sequence":
        log_rho_T = segment_sum(raw_T, mask_T, seq_id_T, num_seqs=num_seqs)[seq_id_T]
    elif config.level == "geometric":
        log_rho_T = segment_mean(raw_T, mask_T, seq_id_T, num_seqs=num_seqs)[seq_id_T]
    else:
        log_rho_T = raw_T
    rho_T = log_rho_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if config.level == "off":
        return BehaviourWeights(mask_T.to(rho_T.dtype), masked(rho_T, mask_T), torch.zeros_like(mask_T))
    if config.mode == "truncate":
        capped_T = (rho_T > config.high) & mask_T
        weight_T = rho_T.clamp(max=config.high)
    else:
        capped_T = ((rho_T > config.high) | (rho_T < config.low)) & mask_T
        weight_T = masked(rho_T, ~capped_T)
    return BehaviourWeights(masked(weight_T, mask_T), masked(rho_T, mask_T), capped_T)


@torch.no_grad()
def effective_sample_size(weight_T: Tensor, *, mask_T: Tensor) -> float:
    """``(sum w)^2 / (n sum w^2)`` over the unmasked positions, in (0, 1]; 0 when every weight is 0."""
    w_T = masked(weight_T, mask_T).double()
    square = float(mask_T.sum() * w_T.square().sum())
    return float(w_T.sum() ** 2) / square if square > 0 else 0.0


@torch.no_grad()
def proximal_loglinear(
    *,
    logp_behaviour_T: Tensor,
    logp_current_T: Tensor,
    version_proximal: int,
    version_behaviour_T: Tensor,
    version_current: int,
) -> Tensor:
    """Proximal log-probabilities without a forward pass, ``[T]``: log-linear interpolation (arXiv 2512.06547).

    ``alpha = (v_prox - v_behaviour) / (v_current - v_behaviour)`` cut to [0, 1] and
    ``log pi_prox = log pi_behaviour + alpha (log pi_current - log pi_behaviour)``. ``v_current`` is the version being
    made, ``v_prox`` the one the update starts from. Where ``v_current = v_behaviour`` the policies are one, alpha = 1.
    """
    span_T = (version_current - version_behaviour_T).to(logp_current_T.dtype)
    numerator_T = (version_proximal - version_behaviour_T).to(logp_current_T.dtype)
    alpha_T = torch.where(span_T > 0, numerator_T / span_T.clamp(min=1), torch.ones_like(span_T)).clamp(0, 1)
    return torch.where(alpha_T == 0, logp_behaviour_T, logp_behaviour_T + alpha_T * (logp_current_T - logp_behaviour_T))
