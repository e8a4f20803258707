"""Where a trainer rank stands: its place among the data-parallel ranks and in its sequence-parallel group.

With ``learner.sequence_parallel`` = s, ranks k s ... k s + s - 1 hold the same micro-batches. Each runs its own run of
tokens through the model; attention exchanges tokens for heads (Ulysses); log-probs of all tokens come together on every
rank of the group, so that everything after the model sees whole sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """``data_group`` (None: all ranks) joins one rank of every sequence group, ``sequence_group`` (None: alone) these.

    A sum over ``data_group`` counts every micro-batch once.
    """

    rank: int
    num_ranks: int
    sequence_size: int = 1
    data_group: Any = None
    sequence_group: Any = None

    @property
    def data_rank(self) -> int:
        return self.rank // self.sequence_size

    @property
    def num_data(self) -> int:
        return self.num_ranks // self.sequence_size

    @property
    def sequence_rank(self) -> int:
        return self.rank % self.sequence_size

    def own_tokens(self, num_tokens: int) -> slice:
        """This rank's run of a micro-batch's tokens, whose number is a multiple of ``sequence_size``."""
        assert num_tokens % self.sequence_size == 0, (num_tokens, self.sequence_size)
        length = num_tokens // self.sequence_size
        return slice(self.sequence_rank * length, (self.sequence_rank + 1) * length)


def make_ranks(*, rank: int, num_ranks: int, sequence_size: int) -> Ranks:
    """Makes the groups; all ranks take part. Raises ValueError when the numbers do not divide."""
    if num_ranks % sequence_size:
        raise ValueError(f"learner.sequence_parallel {sequence_size} does not divide trainer.num_ranks {num_ranks}")
    if sequence_size == 1:
        return Ranks(rank, num_ranks)
    own: dict[str, Any] = {}
    for start in range(0, num_ranks, sequence_size):
        members = list(range(start, start + sequence_size))
        group = dist.new_group(members)
        if rank in members:
            own["sequence_group"] = group
    for place in range(sequence_size):
        members = list(range(place, num_ranks, sequence_size))
        group = dist.new_group(members)
        if rank in members:
            own["data_group"] = group
    return Ranks(rank, num_ranks, sequence_size, **own)


@dataclass(frozen=True)
class OwnRows:
    """The rows of the hidden states that this rank turns into outputs: ``row_t`` in its own run of tokens, and
    ``place_t`` their places among the T outputs of the micro-batch. ``places`` are those of every rank of the group.

    A rank without any output computes one that nobody takes, so that its parameters take part in the backward pass.
    """

    row_t: torch.Tensor
    place_t: torch.Tensor
    places: tuple[torch.Tensor, ...] = ()

    def join(self, outputs: tuple[torch.Tensor, ...], ranks: Ranks) -> tuple[torch.Tensor, ...]:
        """The outputs of all ranks of the sequence group, ``[T]`` each, on every one of them."""
        if ranks.sequence_group is None:
            return outputs
        return tuple(_Join.apply(x_t, self.places, ranks) for x_t in outputs)


def own_rows(predict_T: torch.Tensor, *, num_tokens: int, ranks: Ranks) -> OwnRows:
    """Which of the T predictions fall into this rank's run of the tokens."""
    if ranks.sequence_group is None:
        return OwnRows(row_t=predict_T, place_t=torch.arange(len(predict_T), device=predict_T.device))
    length = num_tokens // ranks.sequence_size
    owner_T = predict_T // length
    places = tuple((owner_T == rank).nonzero()[:, 0] for rank in range(ranks.sequence_size))
    place_t = places[ranks.sequence_rank]
    if not len(place_t):
        zero = torch.zeros(1, dtype=torch.int64, device=predict_T.device)
        return OwnRows(row_t=zero, place_t=zero, places=places)
    return OwnRows(row_t=predict_T[place_t] - ranks.sequence_rank * length, place_t=place_t, places=places)


class _Join(torch.autograd.Function):
    """All ranks go on to compute the same loss, so each one's own outputs take their part of the same gradient."""

    @staticmethod
    def forward(ctx: Any, x_t: torch.Tensor, places: tuple[torch.Tensor, ...], ranks: Ranks) -> torch.Tensor:
        ctx.own, ctx.num_own = places[ranks.sequence_rank], len(x_t)
        longest = max(1, *(len(place_t) for place_t in places))
        padded = x_t.new_zeros(longest)
        padded[: len(x_t)] = x_t
        parts = [torch.empty_like(padded) for _ in places]
        dist.all_gather(parts, padded, group=ranks.sequence_group)
        out_T = x_t.new_empty(sum(len(place_t) for place_t in places))
        for place_t, part in zip(places, parts, strict=True):
            out_T[place_t] = part[: len(place_t)]
        return out_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_t = grads[0].new_zeros(ctx.num_own)
        grad_t[: len(ctx.own)] = grads[0][ctx.own]
        return grad_t, None, None
