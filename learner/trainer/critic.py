"""The critic: its own model and optimizer under ZeRO-3, trained beside the policy when the advantage is GAE."""

from __future__ import annotations

import torch

from learner.algorithms.metrics import MetricSums, add_metric_sums
from learner.algorithms.value_loss import compute_value_loss
from learner.trainer.advantage import ByMicroBatch, micro_batches
from learner.trainer.deepspeed_adapter import StepOutcome, ZeroEngine
from learner.trainer.forward import load_critic
from learner.trainer.ranks import Ranks
from learner.trainer.schedule import learning_rate
from learner.trainer.update import MiniBatch, PreparedBatch
from protocol.config import Config


class Critic:
    """Values of the tokens of a batch, and the steps towards their targets. All ranks call the same methods."""

    def __init__(self, config: Config, *, dtype: torch.dtype, kernel: str, ranks: Ranks, device: torch.device) -> None:
        """Loads ``learner.critic.path`` (default: the policy's model) and shards it."""
        self._section, self._config = config.learner.critic, config
        model = load_critic(
            self._section.path or config.model.path,
            dtype=dtype,
            kernel=kernel,
            gradient_checkpointing=config.model.gradient_checkpointing,
            checkpoint_share=config.model.checkpoint_share,
            liger=config.learner.liger,
            ranks=ranks,
        )
        optim = config.learner.optim.model_copy(update={"lr": self._section.lr})
        self._optim = optim
        self.zero = ZeroEngine(
            model, learner=config.learner.model_copy(update={"optim": optim}), dtype=dtype, device=device
        )

    def is_warming_up(self, policy_version: int) -> bool:
        """Whether this update trains the critic alone (``learner.critic.warmup_updates``)."""
        return policy_version < self._section.warmup_updates

    @torch.no_grad()
    def values(self, prepared: PreparedBatch) -> ByMicroBatch:
        """Values as they are at the start of the update."""
        return {id(micro_batch): self.zero(micro_batch) for micro_batch in micro_batches(prepared)}

    def train_mini_batch(
        self, mini: MiniBatch, *, old_values: ByMicroBatch, returns: ByMicroBatch, policy_version: int
    ) -> tuple[MetricSums, StepOutcome]:
        """Forward and backward passes and one step with the clipped value loss. Returns this rank's sums.

        Values or targets that are not finite make the loss NaN, so that all ranks drop the step together.
        """
        sums: MetricSums = {}
        last = len(mini.micro_batches) - 1
        for number, micro_batch in enumerate(mini.micro_batches):
            key = id(micro_batch)
            value_T, old_T, return_T = self.zero(micro_batch), old_values[key], returns[key]
            sound_T = value_T.detach().isfinite() & old_T.isfinite() & return_T.isfinite()
            is_broken = bool((micro_batch.mask_T & ~sound_T).any())
            loss, part = compute_value_loss(
                value_T=value_T,
                old_value_T=old_T,
                return_T=return_T,
                mask_T=micro_batch.mask_T & sound_T,
                seq_id_T=micro_batch.seq_id_T,
                clip=self._section.value_clip,
                num_tokens_global=mini.num_tokens_global,
            )
            if is_broken:
                loss = value_T.sum() * float("nan")
            self.zero.backward(loss * self.zero.num_ranks, is_last=number == last)
            sums = add_metric_sums(sums, part)
        lr = learning_rate(self._optim, policy_version=policy_version, max_updates=self._config.run.max_updates)
        return sums, self.zero.step(lr=lr)
