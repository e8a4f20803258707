"""Random micro-batches for the tests of losses."""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from learner.algorithms.policy_loss import LossConfig, compute_policy_loss
from learner.algorithms.tensors import count_trained


@dataclass(frozen=True)
class Batch:
    """Flat packed float64 tensors, ``[T]``."""

    logp_T: Tensor
    logp_prox_T: Tensor
    logp_behaviour_T: Tensor
    adv_T: Tensor
    mask_T: Tensor
    seq_id_T: Tensor
    entropy_T: Tensor
    ref_logp_T: Tensor

    def numpy(self) -> dict[str, np.ndarray]:
        return {f.name.removesuffix("_T"): getattr(self, f.name).detach().numpy() for f in fields(self)}

    def select(self, sequences: list[int]) -> "Batch":
        """The given sequences, renumbered from 0 in that order."""
        rows = [torch.nonzero(self.seq_id_T == s).flatten() for s in sequences]
        index = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
        ids = torch.cat([torch.full((len(r),), new) for new, r in enumerate(rows)]) if rows else index
        return replace(Batch(*(getattr(self, f.name)[index] for f in fields(self))), seq_id_T=ids.long())


def make_batch(seed: int, *, num_seqs: int = 5, max_length: int = 7, scale: float = 0.5) -> Batch:
    """Sequences of 2..max_length tokens, each with at least one trained token; log-prob gaps of about ``scale``."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, max_length + 1, num_seqs)
    seq_id = np.repeat(np.arange(num_seqs), lengths)
    num = len(seq_id)
    mask = rng.random(num) < 0.7
    mask[np.cumsum(lengths) - 1] = True
    logp = -rng.exponential(1.0, num)

    def near() -> Tensor:
        return torch.tensor(logp + scale * rng.standard_normal(num))

    return Batch(
        logp_T=torch.tensor(logp),
        logp_prox_T=near(),
        logp_behaviour_T=near(),
        adv_T=torch.tensor(rng.standard_normal(num)),
        mask_T=torch.tensor(mask),
        seq_id_T=torch.tensor(seq_id),
        entropy_T=torch.tensor(rng.exponential(1.0, num)),
        ref_logp_T=near(),
    )


def loss_and_grad(batch: Batch, config: LossConfig, *, counts: tuple[int, int] | None = None):
    """Loss, gradient with respect to ``logp_T`` and metric sums."""
    logp_T = batch.logp_T.clone().requires_grad_(True)
    entropy_T = batch.entropy_T + 0.1 * logp_T
    num_tokens, num_seqs = counts or count_trained(batch.mask_T, batch.seq_id_T)
    loss, sums = compute_policy_loss(
        logp_T=logp_T,
        logp_prox_T=batch.logp_prox_T,
        logp_behaviour_T=batch.logp_behaviour_T,
        adv_T=batch.adv_T,
        mask_T=batch.mask_T,
        seq_id_T=batch.seq_id_T,
        entropy_T=entropy_T,
        ref_logp_T=batch.ref_logp_T,
        config=config,
        num_tokens_global=num_tokens,
        num_seqs_global=num_seqs,
    )
    loss.backward()
    return loss.detach(), logp_T.grad, sums
