"""The training loop that the learner is measured against: plain PyTorch and transformers, written to be fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 1024


class PlainLoop:
    """Unpadded rows, SDPA, a loss in chunks, full gradient checkpointing, fused AdamW in the model's own type."""

    def __init__(self, path: Path, *, dtype: torch.dtype, device: torch.device, lr: float) -> None:
        from transformers import AutoModelForCausalLM

        self.device = device
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").to(device)
        self.model.train()
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)

    def step(self, ids_BT: torch.Tensor, weight_B: torch.Tensor) -> float:
        """One step of REINFORCE on whole rows: ``-sum_t w_b log p / num_tokens``; returns the loss."""
        hidden_BTD = self.model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state[:, :-1]
        hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
        target_N = ids_BT[:, 1:].reshape(-1)
        weight_N = weight_B[:, None].expand(-1, ids_BT.shape[1] - 1).reshape(-1)
        loss = torch.zeros((), device=self.device)
        for start in range(0, len(target_N), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            loss = loss + checkpoint(
                _chunk_loss,
                hidden_ND[part],
                self.model.get_output_embeddings().weight,
                target_N[part],
                weight_N[part],
                use_reentrant=False,
            )
        loss = loss / len(target_N)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def _chunk_loss(hidden_tD: torch.Tensor, head_VD: Any, target_t: torch.Tensor, weight_t: torch.Tensor) -> torch.Tensor:
    logits_tV = (hidden_tD @ head_VD.T).float()
    return (F.cross_entropy(logits_tV, target_t, reduction="none") * weight_t).sum()
