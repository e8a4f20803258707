"""The learner's engine: one policy under ZeRO-3, trained batch by batch. Knows nothing of sockets or processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from learner.algorithms.entropy import AdaptiveEntropy, FixedEntropy
from learner.algorithms.kl import AdaptiveKL, FixedKL
from learner.algorithms.metrics import MetricSums, add_metric_sums, finalize_metrics
from learner.trainer import rewards
from learner.trainer.advantage import ByMicroBatch, critic_targets, micro_batches, spread, sum_by_sequence
from learner.trainer.attention import choose_kernel
from learner.trainer.batch import MicroBatch, TrainBatch, UpdateResult
from learner.trainer.critic import Critic
from learner.trainer.deepspeed_adapter import (
    OPTIMIZER_STATES,
    FrozenEngine,
    StateKind,
    StepOutcome,
    ZeroEngine,
    init_distributed,
)
from learner.trainer.export import checkpoint_tensors
from learner.trainer.forward import PolicyModel, hf_name, load_policy
from learner.trainer.memory import resident_bytes
from learner.trainer.ranks import make_ranks
from learner.trainer.reduce import sum_over_ranks
from learner.trainer.schedule import learning_rate
from learner.trainer.speed import SpeedMeter
from learner.trainer.update import (
    PolicyOutputs,
    PreparedBatch,
    StepInputs,
    loss_config,
    policy_outputs,
    prepare,
    reference_kl,
    train_mini_batch,
    with_coefficients,
)
from learner.weights.snapshot import Snapshot
from protocol.config import Config
from protocol.config.checks import max_response_tokens

CRITIC_PREFIX = "critic."


@dataclass(frozen=True)
class Signal:
    """What an update learns from, by micro-batch; ``values`` and ``returns`` (targets) only with a critic."""

    advantages: ByMicroBatch
    reference: ByMicroBatch
    values: ByMicroBatch = field(default_factory=dict)
    returns: ByMicroBatch = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


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
        """Joins the process group, loads ``model.path`` (and reference and critic, as configured) and shards it.

        Raises ValueError for settings this engine refuses, before anything is loaded.
        """
        self.config, self.rank, self.num_ranks, self.device = config, rank, num_ranks, device
        algorithm = config.algorithm
        self._loss = loss_config(algorithm, max_response_tokens=max_response_tokens(config))
        self._kernel = choose_kernel(config.model.attention, device=device)
        if algorithm.advantage == "remax":
            raise ValueError(
                "algorithm.advantage=remax needs the reward of each prompt's greedy answer, which the coordinator does "
                "not sample: use rloo"
            )
        if config.learner.liger and device.type != "cuda":
            raise ValueError("learner.liger needs a GPU: set it to false")
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        init_distributed(rank=rank, num_ranks=num_ranks, device=device, timeout_s=config.trainer.collective_timeout_s)
        self.ranks = make_ranks(rank=rank, num_ranks=num_ranks, sequence_size=config.learner.sequence_parallel)
        torch.manual_seed(config.run.seed + rank)
        self.zero = ZeroEngine(self._load(trained=True), learner=config.learner, dtype=self.dtype, device=device)
        self._reference: FrozenEngine | None = None
        if algorithm.kl.where != "off":
            self._reference = FrozenEngine(
                self._load(trained=False), learner=config.learner, dtype=self.dtype, device=device
            )
        self.critic: Critic | None = None
        if algorithm.advantage == "gae":
            self.critic = Critic(config, dtype=self.dtype, kernel=self._kernel, ranks=self.ranks, device=device)
        self.kl_controller = _kl_controller(config)
        self.entropy_controller = _entropy_controller(config)
        self._speed = SpeedMeter(config, num_ranks=num_ranks, device=device)
        self._host_state: dict[str, torch.Tensor] = {}
        self.policy_version = 0
        self.last_batch_id = 0
        self.num_skipped_in_a_row = 0

    def _load(self, *, trained: bool) -> PolicyModel:
        model = self.config.model
        return load_policy(
            model.path,
            dtype=self.dtype,
            kernel=self._kernel,
            chunk_tokens=self.config.learner.logprob_chunk_tokens,
            gradient_checkpointing=trained and model.gradient_checkpointing,
            checkpoint_share=model.checkpoint_share,
            liger=self.config.learner.liger,
            ranks=self.ranks,
        )

    def train_batch(self, batch: TrainBatch) -> UpdateResult:
        """Trains one batch: all its mini-batches, one optimizer step each.

        A step whose gradient is not finite is dropped on all ranks and counted, as is one without a token to train;
        neither version nor learning rate advance when all are. Raises ValueError on all ranks together when one of
        them refuses the batch; nothing was trained then.
        """
        started = time.monotonic()
        config, items = self.config, batch.plan.items
        prepared = prepare(
            batch,
            ranks=self.ranks,
            num_mini_batches=config.learner.mini_batches,
            policy_version=self.policy_version,
            max_staleness=config.algorithm.max_staleness,
            excluded=rewards.excluded_items(items, algorithm=config.algorithm),
            kernel=self._kernel,
            device=self.device,
        )
        reward_S = rewards.rewards(items, config=config)
        metrics = rewards.table_metrics(items, reward_S=reward_S)
        start = self._start_of_update(prepared)
        signal = self._signal(prepared, batch=batch, reward_S=reward_S, start=start)
        inputs = self._step_inputs(batch, signal=signal, start=start)
        lr = learning_rate(config.learner.optim, policy_version=self.policy_version, max_updates=config.run.max_updates)
        sums, outcomes, critic_outcomes = self._step_mini_batches(prepared, inputs=inputs, signal=signal, lr=lr)
        metrics |= signal.metrics | finalize_metrics(sums | prepared.sums) | _step_metrics(outcomes, lr=lr)
        if critic_outcomes:
            metrics |= _critic_step_metrics(critic_outcomes)
        metrics |= self._speed.metrics(items, seconds=time.monotonic() - started)
        return self._finish(batch, prepared, outcomes=outcomes or critic_outcomes, metrics=metrics)

    def _signal(
        self, prepared: PreparedBatch, *, batch: TrainBatch, reward_S: np.ndarray, start: PolicyOutputs
    ) -> Signal:
        """Advantages of the trained tokens, value targets and reference log-probs, all fixed for the whole update."""
        algorithm = self.config.algorithm
        reference: ByMicroBatch = {}
        if self._reference is not None:
            reference = policy_outputs(prepared, forward=self._reference, ranks=self.ranks, device=self.device).logp
        kl: ByMicroBatch = {}
        if algorithm.kl.where == "reward":
            kl = {
                key: self.kl_controller.value * kl_T
                for key, kl_T in reference_kl(
                    prepared, logp=start.logp, reference=reference, estimator=algorithm.kl.estimator
                ).items()
            }
        if self.critic is None:
            if kl:
                penalty_S = sum_by_sequence(kl, prepared, num_seqs=len(reward_S), ranks=self.ranks, device=self.device)
                reward_S = reward_S - penalty_S
            adv_S = batch.advantages
            if adv_S is None:
                adv_S = rewards.advantages(reward_S, batch.plan.items, algorithm=algorithm)
            return Signal(spread(adv_S, prepared, device=self.device), reference)
        values = self.critic.values(prepared)
        log_rho = {}
        if algorithm.vtrace:
            log_rho = {id(mb): start.logp[id(mb)] - mb.logp_behaviour_T for mb in micro_batches(prepared)}
        targets = critic_targets(
            prepared,
            reward_S=reward_S,
            values=values,
            token_penalty=kl,
            log_rho=log_rho,
            algorithm=algorithm,
            ranks=self.ranks,
            device=self.device,
        )
        return Signal(targets.advantages, reference, values, targets.returns, targets.metrics)

    def _step_inputs(self, batch: TrainBatch, *, signal: Signal, start: PolicyOutputs) -> StepInputs:
        algorithm = self.config.algorithm
        return StepInputs(
            advantages=signal.advantages,
            trajectory_ids=[f"{item.group_id}/{item.slot} ({item.prompt_id})" for item in batch.plan.items],
            config=with_coefficients(
                self._loss,
                kl_coef=self.kl_controller.value if algorithm.kl.where == "loss" else 0.0,
                entropy_coef=self.entropy_controller.step(entropy=start.entropy),
            ),
            policy_version=self.policy_version,
            loglinear=algorithm.proximal == "loglinear",
            from_critic=self.critic is not None,
            proximal={} if algorithm.proximal == "loglinear" else start.logp,
            reference=signal.reference,
        )

    def _step_mini_batches(
        self, prepared: PreparedBatch, *, inputs: StepInputs, signal: Signal, lr: float
    ) -> tuple[dict[str, Any], list[StepOutcome], list[StepOutcome]]:
        """Sums over all ranks, and the outcomes of the policy's and the critic's steps.

        While the critic warms up the policy takes none.
        """
        sums: MetricSums = {}
        outcomes: list[StepOutcome] = []
        critic_outcomes: list[StepOutcome] = []
        critic = self.critic
        train_policy = critic is None or not critic.is_warming_up(self.policy_version)
        for mini in prepared.mini_batches:
            own, critics_own = StepOutcome.nothing(), StepOutcome.nothing()
            if mini.num_tokens_global and train_policy:
                part, own = train_mini_batch(mini, zero=self.zero, inputs=inputs, lr=lr)
                sums = add_metric_sums(sums, part)
            if mini.num_tokens_global and critic is not None:
                part, critics_own = critic.train_mini_batch(
                    mini, old_values=signal.values, returns=signal.returns, policy_version=self.policy_version
                )
                sums = add_metric_sums(sums, part)
            if train_policy:
                outcomes.append(own)
            if critic is not None:
                critic_outcomes.append(critics_own)
            applied = own.applied if train_policy else critics_own.applied
            self.num_skipped_in_a_row = 0 if applied else self.num_skipped_in_a_row + 1
        total = sum_over_ranks(sums, device=self.device, group=self.ranks.data_group) if sums else {}
        return total, outcomes, critic_outcomes

    def _finish(
        self, batch: TrainBatch, prepared: PreparedBatch, *, outcomes: list[StepOutcome], metrics: dict[str, float]
    ) -> UpdateResult:
        num_applied = sum(outcome.applied for outcome in outcomes)
        if num_applied:
            self.policy_version += 1
            if "actor/kl_ref" in metrics:
                self.kl_controller.update(kl=metrics["actor/kl_ref"], num_seqs=len(batch.plan.items))
        self.last_batch_id = batch.plan.batch_id
        metrics |= {
            "staleness/max": float(prepared.max_token_staleness),
            "learner/applied_steps": float(num_applied),
            "learner/skipped_steps": float(len(outcomes) - num_applied),
            "learner/kl_coef": float(self.kl_controller.value),
            "learner/entropy_coef": float(self.entropy_controller.coef),
            "learner/resident_mb": resident_bytes() / 1e6,
        }
        return UpdateResult(
            policy_version=self.policy_version,
            num_applied=num_applied,
            num_skipped=len(outcomes) - num_applied,
            num_skipped_in_a_row=self.num_skipped_in_a_row,
            num_trained_tokens=sum(m.num_tokens_global for m in prepared.mini_batches),
            num_stale_tokens=int(prepared.sums["stale_tokens"]),
            max_token_staleness=prepared.max_token_staleness,
            trained_ages=prepared.trained_ages,
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
        )

    def _start_of_update(self, prepared: PreparedBatch) -> PolicyOutputs:
        """The proximal policy's log-probs, and the entropy that the adaptive controller goes by.

        They need a forward pass of their own only with several mini-batches, the adaptive controller, V-trace or the
        KL in the reward: in the first (or only) optimizer step the current policy is the proximal one, so its
        detached log-probs are the same numbers.
        """
        algorithm = self.config.algorithm
        several = len(prepared.mini_batches) > 1 and algorithm.proximal == "recompute"
        adaptive = algorithm.entropy.controller == "adaptive"
        if not (several or adaptive or algorithm.vtrace or algorithm.kl.where == "reward"):
            return PolicyOutputs(logp={}, entropy=0.0)
        return policy_outputs(prepared, forward=self.zero, ranks=self.ranks, device=self.device)

    def evaluate(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of a packed micro-batch under the current policy, without gradient."""
        with torch.no_grad():
            return self.zero(micro_batch)

    def gather_snapshot(self, policy_version: int | None = None) -> Snapshot | None:
        """All ranks take part; rank 0 gets the whole policy in the computing type under Hugging Face names.

        The snapshot lies in device memory where there is room (``weights.snapshot``), else in host memory.
        """
        to_device = self._snapshot_on_device()
        tensors = [(hf_name(name), tensor if to_device else tensor.cpu()) for name, tensor in self.zero.gather("model")]
        version = self.policy_version if policy_version is None else policy_version
        if self.rank:
            return None
        return Snapshot(policy_version=version, tensors=checkpoint_tensors(self.zero.module.hf, tensors))

    def _snapshot_on_device(self) -> bool:
        where = self.config.weights.snapshot
        if self.device.type == "cpu" or where == "device":
            return True
        num_bytes = 2 * sum(shape.numel() for shape in self.shapes().values())
        return where == "auto" and torch.cuda.mem_get_info(self.device)[0] > 4 * num_bytes

    def gather_state(self) -> dict[str, torch.Tensor]:
        """All ranks take part; rank 0 gets master weights and moments, float32 on the host, as ``kind/name``.

        The tensors are the engine's own and hold until the next call: making new ones costs more than the copy.
        """
        state: dict[str, torch.Tensor] = {}
        for prefix, zero, name_of in self._trained_models():
            kinds: list[StateKind] = ["master"]
            if zero.num_steps:
                kinds += OPTIMIZER_STATES
            for kind in kinds:
                for name, tensor in zero.gather(kind, copy=False):
                    key = f"{kind}/{prefix}{name_of(name)}"
                    if key not in self._host_state:
                        self._host_state[key] = torch.empty(
                            tensor.shape, dtype=tensor.dtype, pin_memory=self.device.type == "cuda"
                        )
                    state[key] = self._host_state[key].copy_(tensor, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return state

    def _trained_models(self) -> list[tuple[str, ZeroEngine, Callable[[str], str]]]:
        models: list[tuple[str, ZeroEngine, Callable[[str], str]]] = [("", self.zero, hf_name)]
        if self.critic is not None:
            models.append((CRITIC_PREFIX, self.critic.zero, str))
        return models

    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the trained tensors: Hugging Face names, the critic's with the prefix ``critic.``."""
        return {
            f"{prefix}{name_of(name)}": shape
            for prefix, zero, name_of in self._trained_models()
            for name, shape in zero.shapes.items()
        }

    def scalars(self) -> dict[str, Any]:
        """The engine's state beside tensors, plain JSON values."""
        return {
            "policy_version": self.policy_version,
            "last_batch_id": self.last_batch_id,
            "num_optimizer_steps": self.zero.num_steps,
            "num_critic_steps": self.critic.zero.num_steps if self.critic is not None else 0,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
            "kl_controller": self.kl_controller.state_dict(),
            "entropy_controller": self.entropy_controller.state_dict(),
        }

    def restore(self, scalars: dict[str, Any], *, read: Callable[[str], torch.Tensor]) -> None:
        """Restores exactly what ``gather_state`` and ``scalars`` gave, on any number of ranks."""
        num_steps = {"": scalars["num_optimizer_steps"], CRITIC_PREFIX: scalars["num_critic_steps"]}
        for prefix, zero, name_of in self._trained_models():
            zero.load(partial(_read_named, read, prefix, name_of), num_steps=num_steps[prefix])
        self.kl_controller.load_state_dict(scalars["kl_controller"])
        self.entropy_controller.load_state_dict(scalars["entropy_controller"])
        self.policy_version = scalars["policy_version"]
        self.last_batch_id = scalars["last_batch_id"]
        self.num_skipped_in_a_row = scalars["num_skipped_in_a_row"]

    def close(self) -> None:
        """Frees the sharded models; the process group stays."""
        for _, zero, _ in self._trained_models():
            zero.destroy()


def _read_named(
    read: Callable[[str], torch.Tensor], prefix: str, name_of: Callable[[str], str], name: str, kind: StateKind
) -> torch.Tensor:
    return read(f"{kind}/{prefix}{name_of(name)}")


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


def _critic_step_metrics(outcomes: list[StepOutcome]) -> dict[str, float]:
    norms = [outcome.grad_norm for outcome in outcomes if outcome.applied]
    metrics = {"critic/skipped_steps": float(len(outcomes) - len(norms))}
    return metrics | ({"critic/grad_norm": sum(norms) / len(norms)} if norms else {})


def _step_metrics(outcomes: list[StepOutcome], *, lr: float) -> dict[str, float]:
    norms = [outcome.grad_norm for outcome in outcomes if outcome.applied]
    metrics = {"actor/lr": lr}
    if norms:
        metrics |= {"actor/grad_norm": sum(norms) / len(norms), "actor/grad_norm/max": max(norms)}
    return metrics
