"""Attention over packed sequences without padding, registered in transformers as ``slipstream_packed``.

Sequences lie one after another on the token axis. Three kernels give the same result:

- ``flash``: flash-attn's varlen kernel, through transformers' own integration;
- ``varlen``: ``torch.nn.attention.varlen`` (CUDA);
- ``sdpa``: documents of similar length are gathered into right-padded blocks. Under a causal mask a query never sees
  the padding behind it, so a block needs no mask, and what is computed at padding is dropped. Blocks of short
  documents take two batched products and a softmax instead: PyTorch's fused kernel for CPUs spends ten times as long
  in their backward pass. Documents may share tokens: the answers to one prompt hold the prompt once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from learner.trainer.ranks import Ranks

ATTENTION_NAME = "slipstream_packed"
ULYSSES_NAME = "slipstream_ulysses"
MAX_PADDING_FRACTION = 0.25
SHORT_DOCUMENT = 256
"""Tokens up to which a block's scores are cheap enough to hold."""


@dataclass(frozen=True)
class Block:
    """Documents of similar length: ``gather [n, L]`` token indices (the last one again at padding).

    ``tokens [M]`` are its real entries and ``places [M]`` where they lie in the flattened block; ``own`` are the places
    whose outputs count, each token's first in the micro-batch. ``is_shared``: some token lies at several places.
    """

    gather: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    own: torch.Tensor
    is_shared: bool


@dataclass(frozen=True)
class PackedLayout:
    """Where the documents of a packed micro-batch lie.

    ``cu_seqlens`` int32 ``[n + 1]`` is for the other kernels; ``blocks`` (sdpa only) cover every document once;
    ``restore [N]`` brings the blocks' own outputs, concatenated, back into token order.
    """

    cu_seqlens: torch.Tensor
    max_length: int
    kernel: str
    blocks: tuple[Block, ...] = ()
    restore: torch.Tensor | None = None


def choose_kernel(wanted: str, *, device: torch.device) -> str:
    """The kernel for ``model.attention`` on this device. Raises ValueError when the wanted one is not to be had."""
    has_flash = importlib.util.find_spec("flash_attn") is not None
    has_varlen = importlib.util.find_spec("torch.nn.attention.varlen") is not None
    if wanted == "auto":
        if device.type != "cuda":
            return "sdpa"
        return "flash" if has_flash else "varlen" if has_varlen else "sdpa"
    if wanted != "sdpa" and device.type != "cuda":
        raise ValueError(f"model.attention={wanted} needs a GPU; set model.attention to auto or sdpa")
    if (wanted == "flash" and not has_flash) or (wanted == "varlen" and not has_varlen):
        raise ValueError(f"model.attention={wanted} is not installed here; set model.attention to auto")
    return wanted


def plan_layout(documents: Sequence[np.ndarray], *, kernel: str, device: torch.device) -> PackedLayout:
    """Layout of documents given as the packed token indices they consist of, in order (at least one each).

    With kernel "sdpa" documents may share leading tokens; the other kernels need each in one run of its own.
    """
    lengths = [len(document) for document in documents]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    if kernel != "sdpa":
        return PackedLayout(cu_seqlens=cu_seqlens, max_length=max(lengths), kernel=kernel)
    blocks, order = [], []
    emitted = np.zeros(1 + max(int(document.max()) for document in documents), dtype=bool)
    for members in _similar_lengths(lengths):
        gather = np.stack([np.pad(documents[i], (0, lengths[members[0]] - lengths[i]), mode="edge") for i in members])
        real = np.arange(gather.shape[1])[None, :] < np.asarray([lengths[i] for i in members])[:, None]
        tokens, places = gather[real], np.flatnonzero(real)
        _, first = np.unique(tokens, return_index=True)
        own = np.sort(first[~emitted[tokens[first]]])
        emitted[tokens] = True
        order.append(tokens[own])
        blocks.append(
            Block(
                gather=torch.from_numpy(gather).to(device),
                tokens=torch.from_numpy(tokens).to(device),
                places=torch.from_numpy(places).to(device),
                own=torch.from_numpy(places[own]).to(device),
                is_shared=len(first) < len(tokens),
            )
        )
    restore = torch.from_numpy(np.argsort(np.concatenate(order))).to(device)
    return PackedLayout(
        cu_seqlens=cu_seqlens, max_length=max(lengths), kernel=kernel, blocks=tuple(blocks), restore=restore
    )


def _similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Groups documents, longest first, so that a group's padding stays below MAX_PADDING_FRACTION of its tokens."""
    groups: list[list[int]] = []
    tokens = longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups:
            padded = (len(groups[-1]) + 1) * longest
            if padded - (tokens + lengths[i]) <= MAX_PADDING_FRACTION * padded:
                groups[-1].append(i)
                tokens += lengths[i]
                continue
        groups.append([i])
        tokens = longest = lengths[i]
    return groups


def register(kernel: str, *, ranks: Ranks) -> str:
    """Makes our attention known to transformers (idempotent); returns the ``attn_implementation`` to load models with.

    With sequence parallelism it runs inside DeepSpeed's Ulysses attention, which exchanges tokens for heads around it.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)
    inner = "flash_attention_2" if kernel == "flash" else ATTENTION_NAME
    if ranks.sequence_group is None:
        return inner
    ALL_ATTENTION_FUNCTIONS.register(ULYSSES_NAME, _ulysses(ALL_ATTENTION_FUNCTIONS[inner], ranks))
    return ULYSSES_NAME


def _ulysses(inner: Any, ranks: Ranks) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    by_shape: dict[tuple[int, int, int], Any] = {}

    def ulysses_attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Query ``[1, H, n, d]`` of this rank's tokens -> ``[1, n, H, d]``; `kwargs` describe the whole micro-batch."""
        num_heads, num_kv_heads, head_size = query.shape[1], key.shape[1], query.shape[3]
        shape = (num_heads, num_kv_heads, head_size)
        if shape not in by_shape:
            by_shape[shape] = UlyssesSPAttentionHF(
                attn=inner,
                batch_size=1,
                attn_head_count=num_heads,
                attn_head_size=head_size,
                kv_head_count=num_kv_heads,
                num_hidden_layers=1,
                process_group=ranks.sequence_group,
                seq_length_is_variable=True,
            )
        return by_shape[shape](module, query, key, value, *args, **kwargs)

    return ulysses_attention


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within documents: query ``[1, H, N, d]``, key, value ``[1, Hkv, N, d]`` -> ``[1, N, H, d]``.

    Raises ValueError when a document is longer than the layer's sliding window (not supported).
    """
    assert query.shape[0] == 1 and attention_mask is None
    if sliding_window is not None and packed_layout.max_length > sliding_window:
        raise ValueError(
            f"a sequence of {packed_layout.max_length} tokens exceeds the model's sliding window of {sliding_window}"
        )
    if packed_layout.kernel == "varlen":
        return _varlen(query[0], key[0], value[0], packed_layout, scaling), None
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    query_NHd, key_NHd, value_NHd = (t[0].transpose(0, 1) for t in (query, key, value))
    outputs = []
    for block in packed_layout.blocks:
        q, k, v = (_ToBlock.apply(t, block).transpose(1, 2) for t in (query_NHd, key_NHd, value_NHd))
        out_nLHd = _block_attention(q, k, v, scaling=scaling).transpose(1, 2)
        outputs.append(out_nLHd.flatten(0, 1).index_select(0, block.own))
    assert packed_layout.restore is not None
    return torch.cat(outputs).index_select(0, packed_layout.restore)[None], None


class _ToBlock(torch.autograd.Function):
    """``[N, H, d] -> [n, L, H, d]``. What lies at padding influences nothing, so the backward pass visits real places
    only: a copy, or a sum in float32 where documents share tokens."""

    @staticmethod
    def forward(ctx: Any, x_NHd: torch.Tensor, block: Block) -> torch.Tensor:
        ctx.block, ctx.num_tokens = block, x_NHd.shape[0]
        return x_NHd.index_select(0, block.gather.flatten()).unflatten(0, block.gather.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_nLHd = grads[0]
        block = ctx.block
        grad_MHd = grad_nLHd.flatten(0, 1).index_select(0, block.places)
        shape = (ctx.num_tokens, *grad_nLHd.shape[2:])
        if not block.is_shared:
            return grad_nLHd.new_zeros(shape).index_copy_(0, block.tokens, grad_MHd), None
        sum_NHd = torch.zeros(shape, dtype=torch.float32, device=grad_MHd.device)
        sum_NHd.index_put_((block.tokens,), grad_MHd.float(), accumulate=True)
        return sum_NHd.to(grad_MHd.dtype), None


def _block_attention(
    q_nHLd: torch.Tensor, k_nHLd: torch.Tensor, v_nHLd: torch.Tensor, *, scaling: float | None
) -> torch.Tensor:
    length = q_nHLd.shape[2]
    if length > SHORT_DOCUMENT or q_nHLd.device.type != "cpu":
        return F.scaled_dot_product_attention(q_nHLd, k_nHLd, v_nHLd, is_causal=True, scale=scaling)
    scale = scaling if scaling is not None else q_nHLd.shape[-1] ** -0.5
    above_diagonal = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores_nHLL = ((q_nHLd * scale) @ k_nHLd.transpose(-1, -2)).masked_fill(above_diagonal, float("-inf"))
    return torch.softmax(scores_nHLL, dim=-1, dtype=torch.float32).to(v_nHLd.dtype) @ v_nHLd


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout, scaling: float | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    repeat = query.shape[0] // key.shape[0]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, dim=0), value.repeat_interleave(repeat, dim=0)
    q, k, v = (t.transpose(0, 1).contiguous() for t in (query, key, value))
    longest, starts = layout.max_length, layout.cu_seqlens
    out_NHd = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=(-1, 0))
    assert isinstance(out_NHd, torch.Tensor)
    return out_NHd[None]
