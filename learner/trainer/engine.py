"""The learner's engine: one policy under ZeRO-3, trained batch by batch. Knows nothing of sockets or processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from learner.algorithms.entropy import AdaptiveEntropy, FixedEntropy
from learner.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate
from learner.algorithms.metrics import MetricSums, add_metric_sums, finalize_metrics
from learner.trainer import rewards
from learner.trainer.attention import choose_kernel
from learner.trainer.batch import MicroBatch, TrainBatch, UpdateResult
from learner.trainer.deepspeed_adapter import OPTIMIZER_STATES, StateKind, StepOutcome, ZeroEngine, init_distributed
from learner.trainer.forward import PolicyModel, hf_name, load_policy
from learner.trainer.memory import resident_bytes
from learner.trainer.reduce import sum_over_ranks
from learner.trainer.schedule import learning_rate
from learner.trainer.update import (
    PolicyOutputs,
    PreparedBatch,
    StepInputs,
    loss_config,
    policy_outputs,
    prepare,
    train_mini_batch,
    with_coefficients,
)
from learner.weights.snapshot import Snapshot
from protocol.config import Config


def choose_device(config: Config, *, rank: int) -> torch.device:
    """The rank's device by ``trainer.device`` and ``trainer.devices``. Raises ValueError for a GPU that is absent."""
    trainer = config.trainer
    if trainer.device == "cpu" or (trainer.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("trainer.device is cuda but torch sees no GPU: set trainer.device to auto or cpu")
    local = rank % trainer.num_ranks
    index = trainer.devices[local] if trainer.devices else local
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"trainer rank {rank} wants GPU {index}, torch sees {torch.cuda.device_count()}: see trainer.devices"
        )
    return torch.device("cuda", index)


class TrainerEngine:
    """Trains a policy on batches of recorded trajectories.

    A policy version is one trained batch: ``policy_version`` advances by one when at least one optimizer step of the
    batch was applied, and with it the learning-rate schedule. All ranks call the same methods in the same order.
    """

    def __init__(self, config: Config, *, rank: int, num_ranks: int, device: torch.device) -> None:
        """Joins the process group, loads ``model.path`` and shards it.

        Raises ValueError for settings this engine refuses, before anything is loaded.
        """
        self.config, self.rank, self.num_ranks, self.device = config, rank, num_ranks, device
        algorithm = config.algorithm
        if algorithm.advantage == "gae":
            raise ValueError(
                "algorithm.advantage=gae needs a critic, which this engine does not train: use grpo or rloo"
            )
        self._loss = loss_config(algorithm, max_response_tokens=config.sampling.max_response_tokens)
        self._kernel = choose_kernel(config.model.attention, device=device)
        if config.learner.liger and device.type != "cuda":
            raise ValueError("learner.liger needs a GPU: set it to false")
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        init_distributed(rank=rank, num_ranks=num_ranks, device=device, timeout_s=config.trainer.collective_timeout_s)
        torch.manual_seed(config.run.seed + rank)
        self.zero = ZeroEngine(self._load(trained=True), learner=config.learner, dtype=self.dtype, device=device)
        self._reference = None if algorithm.kl.where == "off" else self._load(trained=False)
        self.kl_controller = _kl_controller(config)
        self.entropy_controller = _entropy_controller(config)
        self.policy_version = 0
        self.last_batch_id = 0
        self.num_skipped_in_a_row = 0

    def _load(self, *, trained: bool) -> PolicyModel:
        model = load_policy(
            self.config.model.path,
            dtype=self.dtype,
            kernel=self._kernel,
            chunk_tokens=self.config.learner.logprob_chunk_tokens,
            gradient_checkpointing=trained and self.config.model.gradient_checkpointing,
            checkpoint_share=self.config.model.checkpoint_share,
            liger=self.config.learner.liger,
        )
        return model if trained else model.requires_grad_(False).to(self.device)

    def train_batch(self, batch: TrainBatch) -> UpdateResult:
        """Trains one batch: all its mini-batches, one optimizer step each.

        A step whose gradient is not finite is dropped on all ranks and counted, as is one without a token to train;
        neither version nor learning rate advance when all are. Raises ValueError on all ranks together when one of
        them refuses the batch; nothing was trained then.
        """
        started = time.monotonic()
        config, plan = self.config, batch.plan
        algorithm = config.algorithm
        prepared = prepare(
            batch,
            rank=self.rank,
            num_mini_batches=config.learner.mini_batches,
            policy_version=self.policy_version,
            max_staleness=algorithm.max_staleness,
            excluded=rewards.excluded_items(plan.items, algorithm=algorithm),
            kernel=self._kernel,
            device=self.device,
        )
        reward_S = rewards.rewards(
            plan.items, algorithm=algorithm, max_response_tokens=config.sampling.max_response_tokens
        )
        metrics = rewards.table_metrics(plan.items, reward_S=reward_S)
        reference = self._reference_logprobs(prepared)
        if algorithm.kl.where == "reward":
            reward_S = reward_S - self.kl_controller.value * self._sequence_kl(
                prepared, reference, num_seqs=len(reward_S)
            )
        start = self._start_of_update(prepared)
        inputs = StepInputs(
            adv_S=rewards.advantages(reward_S, plan.items, algorithm=algorithm),
            trajectory_ids=[f"{item.group_id}/{item.slot} ({item.prompt_id})" for item in plan.items],
            config=with_coefficients(
                self._loss,
                kl_coef=self.kl_controller.value if algorithm.kl.where == "loss" else 0.0,
                entropy_coef=self.entropy_controller.step(entropy=start.entropy),
            ),
            policy_version=self.policy_version,
            loglinear=algorithm.proximal == "loglinear",
            proximal=start.logp,
            reference=reference,
        )
        lr = learning_rate(config.learner.optim, policy_version=self.policy_version, max_updates=config.run.max_updates)
        sums, outcomes = self._step_mini_batches(prepared, inputs=inputs, lr=lr)
        metrics |= finalize_metrics(sums | prepared.sums) | _step_metrics(outcomes, lr=lr)
        return self._finish(batch, prepared, outcomes=outcomes, metrics=metrics, seconds=time.monotonic() - started)

    def _step_mini_batches(
        self, prepared: PreparedBatch, *, inputs: StepInputs, lr: float
    ) -> tuple[dict[str, Any], list[StepOutcome]]:
        sums: MetricSums = {}
        outcomes = []
        for mini in prepared.mini_batches:
            if mini.num_tokens_global == 0:
                outcomes.append(StepOutcome(applied=False, grad_norm=0.0))
            else:
                part, outcome = train_mini_batch(mini, zero=self.zero, inputs=inputs, lr=lr)
                sums = add_metric_sums(sums, part)
                outcomes.append(outcome)
            self.num_skipped_in_a_row = 0 if outcomes[-1].applied else self.num_skipped_in_a_row + 1
        return (sum_over_ranks(sums, device=self.device) if sums else {}), outcomes

    def _finish(
        self,
        batch: TrainBatch,
        prepared: PreparedBatch,
        *,
        outcomes: list[StepOutcome],
        metrics: dict[str, float],
        seconds: float,
    ) -> UpdateResult:
        num_applied = sum(outcome.applied for outcome in outcomes)
        if num_applied:
            self.policy_version += 1
            if "actor/kl_ref" in metrics:
                self.kl_controller.update(kl=metrics["actor/kl_ref"], num_seqs=len(batch.plan.items))
        self.last_batch_id = batch.plan.batch_id
        num_tokens = sum(item.num_prompt_tokens + item.num_response_tokens for item in batch.plan.items)
        metrics |= {
            "staleness/max": float(prepared.max_token_staleness),
            "learner/applied_steps": float(num_applied),
            "learner/skipped_steps": float(len(outcomes) - num_applied),
            "learner/kl_coef": float(self.kl_controller.value),
            "learner/entropy_coef": float(self.entropy_controller.coef),
            "learner/resident_mb": resident_bytes() / 1e6,
            "perf/update_seconds": seconds,
            "perf/learner_tokens_per_second": num_tokens / max(seconds, 1e-9),
        }
        return UpdateResult(
            policy_version=self.policy_version,
            num_applied=num_applied,
            num_skipped=len(outcomes) - num_applied,
            num_skipped_in_a_row=self.num_skipped_in_a_row,
            num_trained_tokens=sum(m.num_tokens_global for m in prepared.mini_batches),
            num_stale_tokens=int(prepared.sums["stale_tokens"]),
            max_token_staleness=prepared.max_token_staleness,
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
        )

    def _start_of_update(self, prepared: PreparedBatch) -> PolicyOutputs:
        """The proximal policy's log-probs, and the entropy that the adaptive controller goes by.

        Both need a forward pass of their own only with several mini-batches or the adaptive controller: in the first
        (or only) optimizer step the current policy is the proximal one, so its detached log-probs are the same
        numbers.
        """
        algorithm = self.config.algorithm
        recompute = len(prepared.mini_batches) > 1 and algorithm.proximal == "recompute"
        if not recompute and algorithm.entropy.controller == "fixed":
            return PolicyOutputs(logp={}, entropy=0.0)
        return policy_outputs(prepared, forward=self.zero, device=self.device)

    def _reference_logprobs(self, prepared: PreparedBatch) -> dict[int, torch.Tensor]:
        if self._reference is None:
            return {}
        return policy_outputs(prepared, forward=self._reference, device=self.device).logp

    @torch.no_grad()
    def _sequence_kl(self, prepared: PreparedBatch, reference: dict[int, torch.Tensor], *, num_seqs: int) -> np.ndarray:
        """Sum over its sampled tokens of each sequence's KL estimate to the reference, ``[S]`` nats, over all ranks."""
        kl_S = torch.zeros(num_seqs, dtype=torch.float64, device=self.device)
        for mini in prepared.mini_batches:
            for mb in mini.micro_batches:
                logp_T, _ = self.zero(mb)
                if not mb.indices:
                    continue
                kl_T = kl_estimate(
                    logp_T=logp_T,
                    ref_logp_T=reference[id(mb)],
                    mask_T=mb.sampled_T,
                    estimator=self.config.algorithm.kl.estimator,
                )
                kl_S.index_add_(0, torch.tensor(mb.indices, device=self.device)[mb.seq_id_T], kl_T.double())
        torch.distributed.all_reduce(kl_S)
        return kl_S.cpu().numpy()

    def evaluate(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of a packed micro-batch under the current policy, without gradient."""
        with torch.no_grad():
            return self.zero(micro_batch)

    def gather_snapshot(self, policy_version: int | None = None) -> Snapshot | None:
        """All ranks take part; rank 0 gets the whole policy in the computing type under Hugging Face names.

        The snapshot lies in host memory, or on the device with ``weights.snapshot=device``.
        """
        to_device = self.config.weights.snapshot == "device" or self.device.type == "cpu"
        tensors = [(hf_name(name), tensor if to_device else tensor.cpu()) for name, tensor in self.zero.gather("model")]
        version = self.policy_version if policy_version is None else policy_version
        return Snapshot(policy_version=version, tensors=tensors) if self.rank == 0 else None

    def gather_state(self) -> dict[str, torch.Tensor]:
        """All ranks take part; rank 0 gets master weights and moments, float32 on the host, as ``kind/name``."""
        kinds: list[StateKind] = ["master"]
        if self.zero.num_steps:
            kinds += OPTIMIZER_STATES
        return {f"{kind}/{hf_name(name)}": t.cpu() for kind in kinds for name, t in self.zero.gather(kind)}

    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the trained tensors under their Hugging Face names."""
        return {hf_name(name): shape for name, shape in self.zero.shapes.items()}

    def scalars(self) -> dict[str, Any]:
        """The engine's state beside tensors, plain JSON values."""
        return {
            "policy_version": self.policy_version,
            "last_batch_id": self.last_batch_id,
            "num_optimizer_steps": self.zero.num_steps,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
            "kl_controller": self.kl_controller.state_dict(),
            "entropy_controller": self.entropy_controller.state_dict(),
        }

    def restore(self, scalars: dict[str, Any], *, read: Callable[[str], torch.Tensor]) -> None:
        """Restores exactly what ``gather_state`` and ``scalars`` gave, on any number of ranks."""
        self.zero.load(lambda name, kind: read(f"{kind}/{hf_name(name)}"), num_steps=scalars["num_optimizer_steps"])
        self.kl_controller.load_state_dict(scalars["kl_controller"])
        self.entropy_controller.load_state_dict(scalars["entropy_controller"])
        self.policy_version = scalars["policy_version"]
        self.last_batch_id = scalars["last_batch_id"]
        self.num_skipped_in_a_row = scalars["num_skipped_in_a_row"]

    def close(self) -> None:
        """Frees the sharded model; the process group stays."""
        self.zero.destroy()


def _kl_controller(config: Config) -> FixedKL | AdaptiveKL:
    kl = config.algorithm.kl
    if kl.where == "off":
        return FixedKL(0.0)
    if kl.controller == "adaptive":
        return AdaptiveKL(kl.coef, target=kl.target, horizon=kl.horizon)
    return FixedKL(kl.coef)


def _entropy_controller(config: Config) -> FixedEntropy | AdaptiveEntropy:
    entropy = config.algorithm.entropy
    if entropy.controller == "adaptive":
        return AdaptiveEntropy(target=entropy.target, delta=entropy.delta, max_coef=entropy.max_coef, coef=entropy.coef)
    return FixedEntropy(entropy.coef)


def _step_metrics(outcomes: list[StepOutcome], *, lr: float) -> dict[str, float]:
    norms = [outcome.grad_norm for outcome in outcomes if outcome.applied]
    metrics = {"actor/lr": lr}
    if norms:
        metrics |= {"actor/grad_norm": sum(norms) / len(norms), "actor/grad_norm/max": max(norms)}
    return metrics
