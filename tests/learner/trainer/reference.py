"""A naive learner: one sequence at a time, whole logits, float64, plain AdamW. What the engine must equal."""

from pathlib import Path

import numpy as np
import torch

from learner.trainer.batch import TrainBatch
from protocol.config import Config


class ReferenceLearner:
    """Decoupled PPO with group-normalised advantages and token mean, straight from the formulas."""

    def __init__(self, config: Config, *, path: Path | None = None) -> None:
        from transformers import AutoModelForCausalLM

        self.config = config
        self.model = AutoModelForCausalLM.from_pretrained(
            path or config.model.path, dtype=torch.float64, attn_implementation="eager"
        )
        optim = config.learner.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            foreach=False,
        )

    def logprobs(self, batch: TrainBatch, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the response tokens of one trajectory at its temperature."""
        item = batch.plan.items[index]
        ids = torch.from_numpy(batch.arrays[index].token_ids.astype(np.int64))
        logits = self.model(input_ids=ids[None], use_cache=False).logits[0].double() / item.temperature
        logq = torch.log_softmax(logits[item.num_prompt_tokens - 1 : -1], dim=-1)
        return logq.gather(1, ids[item.num_prompt_tokens :, None])[:, 0], -(logq.exp() * logq).sum(-1)

    def advantages(self, batch: TrainBatch) -> list[float]:
        scores: dict[int, list[float]] = {}
        for item in batch.plan.items:
            scores.setdefault(item.group_id, []).append(item.score)
        return [
            (item.score - np.mean(scores[item.group_id])) / (np.std(scores[item.group_id], ddof=1) + 1e-6)
            for item in batch.plan.items
        ]

    def train_batch(self, batch: TrainBatch, *, num_mini_batches: int = 1) -> list[float]:
        """Trains the batch; returns each optimizer step's loss."""
        algorithm = self.config.algorithm
        advantages = self.advantages(batch)
        with torch.no_grad():
            proximal = [self.logprobs(batch, i)[0] for i in range(len(batch.plan.items))]
        groups = list(dict.fromkeys(item.group_id for item in batch.plan.items))
        size = len(groups) // num_mini_batches
        losses = []
        for mini in range(num_mini_batches):
            members = set(groups[mini * size : (mini + 1) * size])
            rows = [i for i, item in enumerate(batch.plan.items) if item.group_id in members]
            num_tokens = sum(int(batch.arrays[i].loss_mask.sum()) for i in rows)
            loss = torch.zeros((), dtype=torch.float64)
            for i in rows:
                logp, entropy = self.logprobs(batch, i)
                mask = torch.from_numpy(batch.arrays[i].loss_mask != 0)
                behaviour = torch.from_numpy(batch.arrays[i].logp_behaviour).double()
                ratio = (logp - proximal[i]).exp()
                clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
                token_loss = torch.maximum(-ratio * advantages[i], -clipped * advantages[i])
                if advantages[i] < 0:
                    token_loss = torch.minimum(token_loss, torch.tensor(-algorithm.clip_dual * advantages[i]))
                weight = (proximal[i] - behaviour).exp().clamp(max=algorithm.behaviour.high)
                token_loss = weight * token_loss - algorithm.entropy.coef * entropy
                loss = loss + token_loss[mask].sum() / num_tokens
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.learner.optim.grad_clip)
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}
