"""The whole policy objective of a micro-batch: clipped loss, behaviour weight, entropy bonus, reference KL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.algorithms.aggregate import AGGREGATIONS
from learner.algorithms.importance import BehaviourConfig, BehaviourWeights, behaviour_weights
from learner.algorithms.kl import Estimator, kl_estimate
from learner.algorithms.losses import POLICY_LOSSES, ClipRange, TokenLoss
from learner.algorithms.metrics import MetricSums, policy_metric_sums
from learner.algorithms.tensors import masked, require_finite


@dataclass(frozen=True)
class LossConfig:
    """Everything ``compute_policy_loss`` depends on beside tensors.

    ``behaviour`` is used by the losses that have a behaviour weight (decoupled_ppo, gspo, reinforce); the others take
    their ratio against the behaviour policy itself. ``entropy_coef`` and ``kl_coef`` are those of this update: with a
    controller, ``dataclasses.replace`` them. ``sum_constant`` belongs to aggregation ``seq_sum_over_constant``.
    """

    loss: str = "decoupled_ppo"
    aggregation: str = "token_mean"
    clip: ClipRange = field(default_factory=ClipRange)
    behaviour: BehaviourConfig = field(default_factory=BehaviourConfig)
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_straight_through: bool = False
    sum_constant: float | None = None

    def __post_init__(self) -> None:
        if self.loss not in POLICY_LOSSES:
            raise ValueError(f"unknown policy loss {self.loss!r}; choose one of {', '.join(POLICY_LOSSES)}")
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"unknown aggregation {self.aggregation!r}; choose one of {', '.join(AGGREGATIONS)}")
        if self.aggregation == "seq_sum_over_constant" and not (self.sum_constant and self.sum_constant > 0):
            raise ValueError("aggregation seq_sum_over_constant needs sum_constant > 0 (the longest answer in tokens)")

    def require_correction(self, *, max_staleness: int) -> None:
        """Raise ValueError when data may be stale and this loss would ignore the recorded behaviour log-probs."""
        if max_staleness > 0 and POLICY_LOSSES[self.loss].weight_numerator and self.behaviour.level == "off":
            raise ValueError(
                f"max_staleness = {max_staleness} with loss {self.loss} and behaviour level off trains stale tokens "
                "without correction: set the behaviour level to token, sequence or geometric, or max_staleness to 0"
            )


def compute_policy_loss(
    *,
    logp_T: Tensor,
    logp_prox_T: Tensor,
    logp_behaviour_T: Tensor | None,
    adv_T: Tensor,
    mask_T: Tensor,
    seq_id_T: Tensor,
    entropy_T: Tensor | None,
    config: LossConfig,
    num_tokens_global: int,
    num_seqs_global: int,
    ref_logp_T: Tensor | None = None,
    trajectory_ids: Sequence[str] | None = None,
) -> tuple[Tensor, MetricSums]:
    """This micro-batch's share of the batch's loss (0-d, with gradient) and sums for the metrics.

    All tensors are ``[T]``: log-probabilities in nats of the current policy (with gradient), the proximal and the
    behaviour policy, all at the sampling temperature; advantages; ``mask_T`` bool, true where a token is trained;
    ``seq_id_T`` int64 in 0..S-1; the exact entropy of the current policy in nats (None only with coefficient 0).
    ``num_tokens_global`` and ``num_seqs_global`` count the trained tokens, and the sequences that have one, over all
    micro-batches and ranks. Sequences must be whole. A micro-batch with nothing to train gives a loss of 0 that
    still has a (zero) gradient. Both results add up over micro-batches and ranks; see ``finalize_metrics``.

    Raises ValueError when the behaviour log-probabilities, or inputs of a term with a coefficient, are missing, when
    the denominators are not positive, and for a non-finite value in an unmasked position, naming the trajectory.
    """
    if logp_behaviour_T is None:
        raise ValueError("behaviour log-probs are missing: trajectories must carry those recorded by the sampler")
    if config.kl_coef and ref_logp_T is None:
        raise ValueError("kl_coef is set but there are no reference log-probs: enable the reference or set it to 0")
    if config.entropy_coef and entropy_T is None:
        raise ValueError("entropy_coef is set but the entropy was not computed")
    if num_tokens_global < 1 or num_seqs_global < 1:
        raise ValueError(f"the batch trains {num_tokens_global} tokens of {num_seqs_global} sequences: skip the update")
    inputs = {
        "logp": logp_T,
        "logp_prox": logp_prox_T,
        "logp_behaviour": logp_behaviour_T,
        "advantage": adv_T,
        "entropy": entropy_T,
        "ref_logp": ref_logp_T,
    }
    require_finite(inputs, mask_T=mask_T, seq_id_T=seq_id_T, trajectory_ids=trajectory_ids)

    token, weights = _weighted_loss(
        logp_T=logp_T,
        logp_prox_T=logp_prox_T,
        logp_behaviour_T=logp_behaviour_T,
        adv_T=adv_T,
        mask_T=mask_T,
        seq_id_T=seq_id_T,
        config=config,
    )

    def aggregate(x_T: Tensor) -> Tensor:
        return AGGREGATIONS[config.aggregation](
            x_T,
            mask_T=mask_T,
            seq_id_T=seq_id_T,
            num_tokens_global=num_tokens_global,
            num_seqs_global=num_seqs_global,
            sum_constant=config.sum_constant,
        )

    pg_loss = aggregate(token.loss_T)
    loss = pg_loss
    if config.entropy_coef:
        assert entropy_T is not None
        loss = loss - config.entropy_coef * aggregate(entropy_T)
    kl_T = None
    if ref_logp_T is not None:
        kl_T = kl_estimate(
            logp_T=logp_T,
            ref_logp_T=ref_logp_T,
            mask_T=mask_T,
            estimator=config.kl_estimator,
            straight_through=config.kl_straight_through,
        )
        if config.kl_coef:
            loss = loss + config.kl_coef * aggregate(kl_T)
    sums = policy_metric_sums(
        loss=loss,
        pg_loss=pg_loss,
        token=token,
        weights=weights,
        logp_T=logp_T,
        logp_prox_T=logp_prox_T,
        logp_behaviour_T=logp_behaviour_T,
        mask_T=mask_T,
        seq_id_T=seq_id_T,
        entropy_T=entropy_T,
        kl_ref_T=kl_T,
        num_tokens_global=num_tokens_global,
    )
    return loss, sums


def _weighted_loss(
    *,
    logp_T: Tensor,
    logp_prox_T: Tensor,
    logp_behaviour_T: Tensor,
    adv_T: Tensor,
    mask_T: Tensor,
    seq_id_T: Tensor,
    config: LossConfig,
) -> tuple[TokenLoss, BehaviourWeights]:
    spec = POLICY_LOSSES[config.loss]
    anchor_T = logp_prox_T if spec.anchor == "proximal" else logp_behaviour_T
    token = spec.fn(
        logp_T=logp_T,
        anchor_T=anchor_T.detach(),
        adv_T=adv_T.detach(),
        mask_T=mask_T,
        seq_id_T=seq_id_T,
        clip=config.clip,
    )
    weights = behaviour_weights(
        logp_T=logp_T if spec.weight_numerator == "current" else logp_prox_T,
        logp_behaviour_T=logp_behaviour_T,
        mask_T=mask_T,
        seq_id_T=seq_id_T,
        config=config.behaviour if spec.weight_numerator else BehaviourConfig(level="off"),
    )
    loss_T = masked(token.loss_T, mask_T) * weights.weight_T.to(token.loss_T.dtype)
    return TokenLoss(loss_T, token.diagnostics), weights


def zero_loss(parameter_output_T: Tensor) -> Tensor:
    """A loss of 0 connected to a forward pass: what a rank back-propagates for a dummy micro-batch."""
    return torch.where(torch.zeros_like(parameter_output_T, dtype=torch.bool), parameter_output_T, 0.0).sum()
