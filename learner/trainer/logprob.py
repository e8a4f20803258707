"""Log-probability and exact entropy of given tokens from hidden states, in chunks: the full logits never exist.

With logits z = h W^T / T, p = softmax(z), H = -sum_j p_j log p_j and y the token:

    d logp / d z_j = 1[j = y] - p_j          d H / d z_j = -p_j (log p_j + H)

Both passes compute the logits of one chunk of tokens at a time in float32; the backward pass recomputes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _ChunkedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        token_T: torch.Tensor,
        temperature_T: torch.Tensor,
        chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = hidden_TD.shape[0]
        logp_T = torch.empty(num_tokens, dtype=torch.float32, device=hidden_TD.device)
        lse_T, entropy_T = torch.empty_like(logp_T), torch.empty_like(logp_T)
        for start in range(0, num_tokens, chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits_tV = _logits(hidden_TD[part], weight_VD, temperature_T[part])
            lse_T[part] = torch.logsumexp(logits_tV, dim=-1)
            logp_T[part] = logits_tV.gather(1, token_T[part, None])[:, 0] - lse_T[part]
            logits_tV -= lse_T[part, None]
            entropy_T[part] = -torch.linalg.vecdot(logits_tV.exp(), logits_tV)
        ctx.save_for_backward(hidden_TD, weight_VD, token_T, temperature_T, lse_T, entropy_T)
        ctx.chunk_tokens = chunk_tokens
        ctx.set_materialize_grads(False)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_logp_T, grad_entropy_T = grads
        hidden_TD, weight_VD, token_T, temperature_T, lse_T, entropy_T = ctx.saved_tensors
        if grad_logp_T is None:
            grad_logp_T = torch.zeros_like(lse_T)
        grad_hidden_TD = torch.empty_like(hidden_TD)
        grad_weight_VD: torch.Tensor | None = None  # float32 as soon as chunks are added up
        for start in range(0, hidden_TD.shape[0], ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            logq_tV = _logits(hidden_TD[part], weight_VD, temperature_T[part]).sub_(lse_T[part, None])
            grad_tV = logq_tV.exp()
            if grad_entropy_T is None:
                grad_tV *= -grad_logp_T[part, None]
            else:
                logq_tV += entropy_T[part, None]
                grad_tV *= logq_tV.mul_(-grad_entropy_T[part, None]).sub_(grad_logp_T[part, None])
            grad_tV.scatter_add_(1, token_T[part, None], grad_logp_T[part, None])
            grad_tV /= temperature_T[part, None]
            low_tV = grad_tV.to(weight_VD.dtype)
            grad_hidden_TD[part] = low_tV @ weight_VD
            part_VD = low_tV.T @ hidden_TD[part]
            grad_weight_VD = part_VD if grad_weight_VD is None else grad_weight_VD.float().add_(part_VD)
        assert grad_weight_VD is not None, "a micro-batch has at least one response token"
        return grad_hidden_TD, grad_weight_VD.to(weight_VD.dtype), None, None, None


def _logits(hidden_tD: torch.Tensor, weight_VD: torch.Tensor, temperature_t: torch.Tensor) -> torch.Tensor:
    return (hidden_tD @ weight_VD.T).float().div_(temperature_t[:, None])


class LogProbHead(nn.Module):
    """The output head: ``forward(hidden_TD, token_T, temperature_T) -> (logp_T, entropy_T)``, float32, nats.

    It is a module, so that ZeRO-3 gathers the head's weight around its forward and backward passes.
    """

    def __init__(self, weight_VD: nn.Parameter, *, chunk_tokens: int) -> None:
        super().__init__()
        self.weight = weight_VD
        self.chunk_tokens = chunk_tokens

    def forward(
        self, hidden_TD: torch.Tensor, token_T: torch.Tensor, temperature_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _ChunkedLogProb.apply(hidden_TD, self.weight, token_T, temperature_T, self.chunk_tokens)
