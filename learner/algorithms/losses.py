"""Policy losses per token, by name in ``POLICY_LOSSES``.

Each takes log-probabilities of the current policy (with gradient) and of an anchor, advantages and the mask, and
returns a loss per token that is finite for any finite log-probabilities. The anchor is the proximal policy for the
losses that are multiplied by a behaviour weight (``learner.algorithms.importance``), and the behaviour policy itself
for those that correct for staleness by their own ratio.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from learner.algorithms.tensors import (
    MAX_LOG_RATIO,
    bounded_log_ratio,
    masked,
    num_sequences,
    segment_mean,
    segment_sum,
)


@dataclass(frozen=True)
class ClipRange:
    """Bounds ``[1 - low, 1 + high]`` on the ratio; ``dual`` > 1 bounds the loss of negative advantages, 0 is off."""

    low: float = 0.2
    high: float = 0.2
    dual: float = 3.0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 or self.high < 0:
            raise ValueError(f"clip_low must be in [0, 1] and clip_high >= 0, got {self.low} and {self.high}")
        if self.dual and self.dual <= 1:
            raise ValueError(f"clip_dual must be above 1, or 0 for off, got {self.dual}")


@dataclass(frozen=True)
class TokenLoss:
    """``loss_T`` with gradient (0 where masked) and detached per-token diagnostics by name."""

    loss_T: Tensor
    diagnostics: dict[str, Tensor] = field(default_factory=dict)


class LossFn(Protocol):
    """The signature that all policy losses share."""

    def __call__(
        self, *, logp_T: Tensor, anchor_T: Tensor, adv_T: Tensor, mask_T: Tensor, seq_id_T: Tensor, clip: ClipRange
    ) -> TokenLoss: ...


def _diagnostics(ratio_T: Tensor, **extra: Tensor) -> dict[str, Tensor]:
    return {"ratio": ratio_T.detach(), **{name: x.detach() for name, x in extra.items()}}


def _clipped(ratio_T: Tensor, adv_T: Tensor, clip: ClipRange) -> TokenLoss:
    plain_T = -adv_T * ratio_T
    clipped_T = -adv_T * ratio_T.clamp(1 - clip.low, 1 + clip.high)
    loss_T = torch.maximum(plain_T, clipped_T)
    dual_T = torch.zeros_like(adv_T, dtype=torch.bool)
    if clip.dual:
        bound_T = -adv_T * clip.dual
        dual_T = (adv_T < 0) & (bound_T < loss_T)
        loss_T = torch.where(dual_T, bound_T, loss_T)
    cut_T = clipped_T > plain_T
    return TokenLoss(
        loss_T,
        _diagnostics(
            ratio_T, clipped_high=cut_T & (ratio_T > 1), clipped_low=cut_T & (ratio_T < 1), clipped_dual=dual_T
        ),
    )


def ppo_clip(
    *, logp_T: Tensor, anchor_T: Tensor, adv_T: Tensor, mask_T: Tensor, seq_id_T: Tensor, clip: ClipRange
) -> TokenLoss:
    """PPO (arXiv 1707.06347) with separate bounds (DAPO, 2503.14476) and dual clip (1912.09729).

    ``r = exp(logp - anchor)``, ``L = max(-A r, -A clamp(r, 1 - low, 1 + high))``, and for ``A < 0``
    ``L = min(L, -A dual)``. Decoupled PPO (2110.00641) is the same with the proximal policy as anchor.
    """
    ratio_T = bounded_log_ratio(logp_T, anchor_T, mask_T).exp()
    return _clipped(ratio_T, masked(adv_T, mask_T), clip)


def gspo(
    *, logp_T: Tensor, anchor_T: Tensor, adv_T: Tensor, mask_T: Tensor, seq_id_T: Tensor, clip: ClipRange
) -> TokenLoss:
    """GSPO (arXiv 2507.18071): the ratio of a token is its sequence's geometric mean, ``exp(mean_t log r_t)``.

    The gradient runs through the mean. The paper aggregates by ``seq_mean_token_mean`` and clips near 3e-4.
    """
    raw_T = masked(logp_T, mask_T) - masked(anchor_T, mask_T)
    mean_S = segment_mean(raw_T, mask_T, seq_id_T, num_seqs=num_sequences(seq_id_T))
    ratio_T = mean_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[seq_id_T]
    token = _clipped(ratio_T, masked(adv_T, mask_T), clip)
    return TokenLoss(masked(token.loss_T, mask_T), token.diagnostics)


def cispo(
    *, logp_T: Tensor, anchor_T: Tensor, adv_T: Tensor, mask_T: Tensor, seq_id_T: Tensor, clip: ClipRange
) -> TokenLoss:
    """CISPO (MiniMax-M1, arXiv 2506.13585): ``L = -sg(clamp(r, 1 - low, 1 + high)) A logp``.

    No token loses its gradient. The paper has no lower bound: ``low = 1``.
    """
    ratio_T = bounded_log_ratio(logp_T, anchor_T, mask_T).exp().detach()
    weight_T = ratio_T.clamp(1 - clip.low, 1 + clip.high)
    loss_T = -weight_T * masked(adv_T, mask_T) * masked(logp_T, mask_T)
    return TokenLoss(
        loss_T, _diagnostics(ratio_T, clipped_high=ratio_T > 1 + clip.high, clipped_low=ratio_T < 1 - clip.low)
    )


def topr(
    *, logp_T: Tensor, anchor_T: Tensor, adv_T: Tensor, mask_T: Tensor, seq_id_T: Tensor, clip: ClipRange
) -> TokenLoss:
    """Tapered off-policy REINFORCE (arXiv 2503.14286): ``L = -w A logp``.

    ``w = 1`` for positive advantages and ``w = min(pi/anchor of the whole sequence, 1)`` for negative ones.
    """
    raw_T = (masked(logp_T, mask_T) - masked(anchor_T, mask_T)).detach()
    sum_S = segment_sum(raw_T, mask_T, seq_id_T, num_seqs=num_sequences(seq_id_T))
    ratio_T = sum_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[seq_id_T]
    adv_T = masked(adv_T, mask_T)
    weight_T = torch.where(adv_T < 0, ratio_T.clamp(max=1.0), torch.ones_like(ratio_T))
    loss_T = -weight_T * adv_T * masked(logp_T, mask_T)
    return TokenLoss(loss_T, _diagnostics(ratio_T, clipped_high=(adv_T < 0) & (ratio_T > 1)))


def reinforce(
    *, logp_T: Tensor, anchor_T: Tensor, adv_T: Tensor, mask_T: Tensor, seq_id_T: Tensor, clip: ClipRange
) -> TokenLoss:
    """``L = -A logp`` (Williams 1992), to be multiplied by the detached weight of ``pi / pi_behaviour``."""
    ratio_T = bounded_log_ratio(logp_T, anchor_T, mask_T).exp()
    return TokenLoss(-masked(adv_T, mask_T) * masked(logp_T, mask_T), _diagnostics(ratio_T))


@dataclass(frozen=True)
class PolicyLoss:
    """A loss, the policy its ratio is taken against, and the numerator of its behaviour weight (None: no weight)."""

    fn: LossFn
    anchor: Literal["proximal", "behaviour"]
    weight_numerator: Literal["proximal", "current"] | None


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "decoupled_ppo": PolicyLoss(ppo_clip, "proximal", "proximal"),
    "ppo_clip": PolicyLoss(ppo_clip, "behaviour", None),
    "gspo": PolicyLoss(gspo, "proximal", "proximal"),
    "cispo": PolicyLoss(cispo, "behaviour", None),
    "topr": PolicyLoss(topr, "behaviour", None),
    "reinforce": PolicyLoss(reinforce, "behaviour", "current"),
}
