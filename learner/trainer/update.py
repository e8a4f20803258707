"""One update: counts over the whole batch, proximal log-probs, and the losses of packed micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from learner.algorithms.importance import BehaviourConfig, proximal_loglinear
from learner.algorithms.kl import Estimator, kl_estimate
from learner.algorithms.losses import ClipRange
from learner.algorithms.metrics import MetricSums, add_metric_sums
from learner.algorithms.policy_loss import LossConfig, compute_policy_loss
from learner.algorithms.staleness import staleness_mask
from learner.algorithms.tensors import count_trained, masked_sum
from learner.trainer.batch import MicroBatch, TrainBatch, build_micro_batch, split_mini_batches
from learner.trainer.deepspeed_adapter import StepOutcome, ZeroEngine
from learner.trainer.ranks import Ranks
from learner.trainer.reduce import max_over_ranks, raise_together, sum_over_ranks
from protocol.config.learner import AlgorithmSection
from protocol.notify import notifier

LogProbs = Callable[[MicroBatch], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class MiniBatch:
    """This rank's micro-batches of one optimizer step and the denominators of all ranks together."""

    micro_batches: list[MicroBatch]
    num_tokens_global: int = 0
    num_seqs_global: int = 0


@dataclass
class PreparedBatch:
    """A batch ready to train: mini-batches, and counts over all ranks (``sums`` are those of ``staleness_mask``).

    ``trained_ages`` counts the tokens that count in the loss by age.
    """

    mini_batches: list[MiniBatch]
    max_token_staleness: int
    trained_ages: dict[int, int] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)


def loss_config(algorithm: AlgorithmSection, *, max_response_tokens: int) -> LossConfig:
    """The loss as configured, with the coefficients the run starts with."""
    behaviour = algorithm.behaviour
    config = LossConfig(
        loss=algorithm.loss,
        aggregation=algorithm.aggregation,
        clip=ClipRange(low=algorithm.clip_low, high=algorithm.clip_high, dual=algorithm.clip_dual),
        behaviour=BehaviourConfig(level=behaviour.level, mode=behaviour.mode, high=behaviour.high, low=behaviour.low),
        entropy_coef=algorithm.entropy.coef,
        kl_coef=algorithm.kl.coef if algorithm.kl.where == "loss" else 0.0,
        kl_estimator=algorithm.kl.estimator,
        sum_constant=float(max_response_tokens),
    )
    config.require_correction(max_staleness=algorithm.max_staleness)
    return config


def prepare(
    batch: TrainBatch,
    *,
    ranks: Ranks,
    num_mini_batches: int,
    policy_version: int,
    max_staleness: int,
    excluded: frozenset[int],
    kernel: str,
    device: torch.device,
) -> PreparedBatch:
    """Packs this rank's micro-batches and counts tokens over all ranks.

    A token sampled before ``policy_version - max_staleness`` leaves the loss's numerator and denominator and is
    counted. Raises ValueError on all ranks together when one of them refuses the batch.
    """
    error: Exception | None = None
    mini_batches: list[MiniBatch] = []
    if len(batch.plan.micro_batches) != ranks.num_data:
        raise ValueError(
            f"batch {batch.plan.batch_id} is planned for {len(batch.plan.micro_batches)} ranks, "
            f"{ranks.num_data} train it"
        )
    try:
        for mini in split_mini_batches(batch.plan, num_mini_batches=num_mini_batches):
            own = mini[ranks.data_rank]
            for index in (i for micro_batch in own for i in micro_batch):
                if index not in batch.arrays:
                    raise ValueError(f"batch {batch.plan.batch_id}: rank {ranks.rank} has no arrays for item {index}")
                batch.arrays[index].check(batch.plan.items[index])
            mini_batches.append(
                MiniBatch(
                    [
                        build_micro_batch(
                            indices,
                            items=batch.plan.items,
                            arrays=batch.arrays,
                            excluded=excluded,
                            kernel=kernel,
                            device=device,
                            multiple_of=ranks.sequence_size,
                        )
                        for indices in own
                    ]
                )
            )
    except (ValueError, IndexError) as refused:
        error = refused
    raise_together(error, device=device)
    return _count(mini_batches, policy_version=policy_version, max_staleness=max_staleness, ranks=ranks, device=device)


def _count(
    mini_batches: list[MiniBatch], *, policy_version: int, max_staleness: int, ranks: Ranks, device: torch.device
) -> PreparedBatch:
    sums: MetricSums = {}
    trained_A = torch.zeros(max_staleness + 1, dtype=torch.int64)
    oldest = 0
    for number, mini in enumerate(mini_batches):
        num_tokens = num_seqs = 0
        for micro_batch in mini.micro_batches:
            fresh_T, part = staleness_mask(
                micro_batch.version_T,
                trained_version=policy_version,
                max_staleness=max_staleness,
                mask_T=micro_batch.sampled_T,
            )
            sums = add_metric_sums(sums, part)
            age_T = (policy_version - micro_batch.version_T)[micro_batch.sampled_T]
            oldest = max(oldest, int(age_T.max()) if age_T.numel() else 0)
            micro_batch.mask_T = micro_batch.mask_T & fresh_T
            age_T = (policy_version - micro_batch.version_T).clamp(min=0)[micro_batch.mask_T]
            trained_A += torch.bincount(age_T, minlength=max_staleness + 1).cpu()
            tokens, seqs = count_trained(micro_batch.mask_T, micro_batch.seq_id_T)
            num_tokens, num_seqs = num_tokens + tokens, num_seqs + seqs
        sums |= {f"{number}/tokens": torch.tensor(num_tokens), f"{number}/seqs": torch.tensor(num_seqs)}
    sums |= {f"trained/{age}": count for age, count in enumerate(trained_A)}
    total = sum_over_ranks(sums, device=device, group=ranks.data_group)
    trained_ages = {age: int(total.pop(f"trained/{age}")) for age in range(max_staleness + 1)}
    for number, mini in enumerate(mini_batches):
        mini.num_tokens_global = int(total.pop(f"{number}/tokens"))
        mini.num_seqs_global = int(total.pop(f"{number}/seqs"))
    return PreparedBatch(
        mini_batches=mini_batches,
        max_token_staleness=int(max_over_ranks(oldest, device=device)),
        trained_ages={age: count for age, count in trained_ages.items() if count},
        sums=total,
    )


@dataclass(frozen=True)
class PolicyOutputs:
    """A policy's log-probs by ``id`` of the micro-batch, and its mean entropy over the trained tokens of all ranks."""

    logp: dict[int, torch.Tensor]
    entropy: float


@torch.no_grad()
def policy_outputs(prepared: PreparedBatch, *, forward: LogProbs, ranks: Ranks, device: torch.device) -> PolicyOutputs:
    """Log-probs and entropy of a policy as it is now, for the whole batch; all ranks take part."""
    logp: dict[int, torch.Tensor] = {}
    entropy = torch.zeros((), dtype=torch.float64, device=device)
    for mini in prepared.mini_batches:
        for micro_batch in mini.micro_batches:
            logp[id(micro_batch)], entropy_T = forward(micro_batch)
            notifier().progress()
            entropy += masked_sum(entropy_T.double(), micro_batch.mask_T)
    num_tokens = sum(mini.num_tokens_global for mini in prepared.mini_batches)
    total = sum_over_ranks({"entropy": entropy}, device=device, group=ranks.data_group)["entropy"]
    return PolicyOutputs(logp=logp, entropy=total / max(1, num_tokens))


@torch.no_grad()
def reference_kl(
    prepared: PreparedBatch, *, logp: dict[int, torch.Tensor], reference: dict[int, torch.Tensor], estimator: Estimator
) -> dict[int, torch.Tensor]:
    """KL estimate to the reference at each sampled token, nats, 0 elsewhere, by micro-batch."""
    return {
        id(micro_batch): kl_estimate(
            logp_T=logp[id(micro_batch)],
            ref_logp_T=reference[id(micro_batch)],
            mask_T=micro_batch.sampled_T,
            estimator=estimator,
        )
        for mini in prepared.mini_batches
        for micro_batch in mini.micro_batches
    }


@dataclass(frozen=True)
class StepInputs:
    """What a mini-batch's loss needs beside the mini-batch; tensors by ``id`` of the micro-batch."""

    advantages: dict[int, torch.Tensor]
    trajectory_ids: list[str]
    config: LossConfig
    policy_version: int
    loglinear: bool
    from_critic: bool
    proximal: dict[int, torch.Tensor]
    reference: dict[int, torch.Tensor]


def train_mini_batch(
    mini: MiniBatch, *, zero: ZeroEngine, inputs: StepInputs, lr: float
) -> tuple[MetricSums, StepOutcome]:
    """Forward and backward passes of all micro-batches and one optimizer step. Returns this rank's sums.

    A loss that this rank refuses becomes NaN until the step, which all ranks then drop, and ends in an error on all of
    them: raising at once would leave the others waiting in a collective.
    """
    sums: MetricSums = {}
    last = len(mini.micro_batches) - 1
    error: Exception | None = None
    for number, micro_batch in enumerate(mini.micro_batches):
        logp_T, entropy_T = zero(micro_batch)
        try:
            loss, part = micro_batch_loss(micro_batch, logp_T=logp_T, entropy_T=entropy_T, mini=mini, inputs=inputs)
        except ValueError as refused:
            error, loss, part = refused, logp_T.sum() * float("nan"), {}
        zero.backward(loss * zero.num_ranks, is_last=number == last)
        sums = add_metric_sums(sums, part)
        notifier().progress()
    outcome = zero.step(lr=lr)
    raise_together(error, device=zero.device)
    return sums, outcome


def micro_batch_loss(
    micro_batch: MicroBatch, *, logp_T: torch.Tensor, entropy_T: torch.Tensor, mini: MiniBatch, inputs: StepInputs
) -> tuple[torch.Tensor, MetricSums]:
    """This rank's share of the mini-batch's loss.

    What a model gave that is not finite (the policy, the reference or the critic has broken) makes the loss NaN
    instead of raising, so that all ranks go through the same collectives and drop the step together.
    """
    current_T = logp_T.detach()
    adv_T = inputs.advantages[id(micro_batch)]
    prox_T = inputs.proximal.get(id(micro_batch), current_T)
    reference_T = inputs.reference.get(id(micro_batch))
    sound_T = current_T.isfinite() & entropy_T.detach().isfinite() & prox_T.isfinite()
    if reference_T is not None:
        sound_T &= reference_T.isfinite()
    if inputs.from_critic:
        sound_T &= adv_T.isfinite()
    broken_T = ~sound_T & micro_batch.mask_T
    is_broken = bool(broken_T.any())
    mask_T = micro_batch.mask_T & ~broken_T if is_broken else micro_batch.mask_T
    if inputs.loglinear:
        prox_T = proximal_loglinear(
            logp_behaviour_T=micro_batch.logp_behaviour_T,
            logp_current_T=current_T,
            version_proximal=inputs.policy_version,
            version_behaviour_T=micro_batch.version_T,
            version_current=inputs.policy_version + 1,
        )
    loss, sums = compute_policy_loss(
        logp_T=logp_T,
        logp_prox_T=prox_T,
        logp_behaviour_T=micro_batch.logp_behaviour_T,
        adv_T=adv_T,
        mask_T=mask_T,
        seq_id_T=micro_batch.seq_id_T,
        entropy_T=entropy_T if inputs.config.entropy_coef else entropy_T.detach(),
        config=inputs.config,
        num_tokens_global=mini.num_tokens_global,
        num_seqs_global=mini.num_seqs_global,
        ref_logp_T=reference_T,
        trajectory_ids=[inputs.trajectory_ids[i] for i in micro_batch.indices],
    )
    return (logp_T.sum() * float("nan"), sums) if is_broken else (loss, sums)


def with_coefficients(config: LossConfig, *, kl_coef: float, entropy_coef: float) -> LossConfig:
    """The same loss with the controllers' coefficients of this update."""
    return replace(config, kl_coef=kl_coef, entropy_coef=entropy_coef)
