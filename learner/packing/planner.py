"""Sequences to micro-batches to ranks: a hard token cap, equal counts on all ranks, balanced FLOPs.

1. *Pack* by best-fit decreasing: longest sequence first, into the fullest micro-batch that still holds it.
2. *Equalise*: split the heaviest micro-batches of several sequences until the count is a multiple of the ranks;
   only when every micro-batch holds one sequence are empty ones (dummies) added.
3. *Distribute* in slots. ZeRO-3 runs micro-batch ``i`` of all ranks in lock step, so the micro-batches are sorted by
   FLOPs and slot ``i`` takes the next ``num_ranks`` of them; inside a slot the heaviest goes to the least loaded rank.
4. *Refine* (``learner.packing.balance``): exchange micro-batches within a slot, then single sequences, between the
   most and the least loaded rank.

The plan depends on the arguments alone: every rank that computes it gets the same one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.packing.balance import refine
from learner.packing.flops import ModelShape, forward_flops

FlopsModel = Callable[[int], float] | ModelShape


@dataclass(frozen=True)
class PackingPlan:
    """Which sequences each rank runs, micro-batch by micro-batch.

    ``micro_batches[rank][slot]`` lists indices into the given lengths, in ascending order. All ranks have the same
    number of slots. An empty list is a dummy: that rank takes part in the slot's collectives and contributes nothing.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    flops: tuple[tuple[float, ...], ...]
    max_tokens: int

    @property
    def num_ranks(self) -> int:
        return len(self.micro_batches)

    @property
    def num_slots(self) -> int:
        """Micro-batches per rank, the same on all ranks."""
        return len(self.micro_batches[0])

    @property
    def num_dummies(self) -> int:
        return sum(not micro_batch for rank in self.micro_batches for micro_batch in rank)

    def is_dummy(self, *, rank: int, slot: int) -> bool:
        """Whether that micro-batch is empty and only keeps the rank in step with the others."""
        return not self.micro_batches[rank][slot]

    @property
    def fill_fraction(self) -> float:
        """Tokens over token capacity of all micro-batches, dummies included, in (0, 1]."""
        return sum(map(sum, self.tokens)) / (self.max_tokens * self.num_ranks * self.num_slots)

    @property
    def flops_imbalance(self) -> float:
        """FLOPs of the most loaded rank over the mean of the ranks, >= 1."""
        totals = [sum(rank) for rank in self.flops]
        return max(totals) * len(totals) / sum(totals)

    @property
    def lockstep_imbalance(self) -> float:
        """Sum over slots of the heaviest rank's FLOPs, over the mean of the ranks' totals: the cost of lock step."""
        table = np.asarray(self.flops)
        return float(table.max(axis=0).sum() / table.sum(axis=1).mean())


def pack(lengths: Sequence[int], *, max_tokens: int, num_ranks: int, flops: FlopsModel) -> PackingPlan:
    """Plan the micro-batches of one update.

    ``lengths``: tokens of each sequence (prompt and answer), ``[S]``, all >= 1. ``max_tokens``: the hard cap on the
    tokens of a micro-batch. ``flops``: the shape of the model, or a function from a length to its cost in any unit.

    Raises ValueError when there is nothing to pack, or a sequence is empty or longer than the cap.
    """
    length_S = np.asarray(lengths, dtype=np.int64)
    _check(length_S, max_tokens=max_tokens, num_ranks=num_ranks)
    if isinstance(flops, ModelShape):
        flops_S = forward_flops(length_S, shape=flops)
    else:
        flops_S = np.asarray([flops(int(length)) for length in length_S], dtype=np.float64)
    if not (np.isfinite(flops_S).all() and (flops_S > 0).all()):
        raise ValueError("the FLOPs of every sequence must be positive and finite; check the flops argument")

    bins = _best_fit_decreasing(length_S, max_tokens=max_tokens)
    _equalise(bins, flops_S=flops_S, num_ranks=num_ranks)
    slots = _distribute(bins, flops_S=flops_S, num_ranks=num_ranks)
    refine(slots, length_S=length_S, flops_S=flops_S, max_tokens=max_tokens)

    micro_batches = tuple(tuple(tuple(sorted(micro_batch)) for micro_batch in rank) for rank in slots)
    return PackingPlan(
        micro_batches=micro_batches,
        tokens=tuple(tuple(int(length_S[list(m)].sum()) for m in rank) for rank in micro_batches),
        flops=tuple(tuple(float(flops_S[list(m)].sum()) for m in rank) for rank in micro_batches),
        max_tokens=max_tokens,
    )


def _check(length_S: NDArray[np.int64], *, max_tokens: int, num_ranks: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    if length_S.size == 0:
        raise ValueError("no sequences to pack: skip the update instead of planning an empty one")
    longest, shortest = int(length_S.argmax()), int(length_S.argmin())
    if length_S[shortest] < 1:
        raise ValueError(f"sequence {shortest} has {length_S[shortest]} tokens; every sequence needs at least one")
    if length_S[longest] > max_tokens:
        raise ValueError(
            f"sequence {longest} has {length_S[longest]} tokens but a micro-batch holds {max_tokens}: "
            f"raise the token cap to at least {length_S[longest]} or lower the maximum lengths"
        )


def _best_fit_decreasing(length_S: NDArray[np.int64], *, max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for index, length in zip(
        np.argsort(-length_S, kind="stable").tolist(), np.sort(length_S)[::-1].tolist(), strict=True
    ):
        position = bisect_left(free, (length, -1))
        if position < len(free):
            room, bin_id = free.pop(position)
            bins[bin_id].append(index)
        else:
            room, bin_id = max_tokens, len(bins)
            bins.append([index])
        if room > length:
            insort(free, (room - length, bin_id))
    return bins


def _equalise(bins: list[list[int]], *, flops_S: NDArray[np.float64], num_ranks: int) -> None:
    """Grow ``bins`` in place to a multiple of ``num_ranks``."""
    weight = [float(flops_S[b].sum()) for b in bins]
    while len(bins) % num_ranks:
        candidates = [i for i, b in enumerate(bins) if len(b) > 1]
        if not candidates:
            bins.extend([] for _ in range(-len(bins) % num_ranks))
            return
        heaviest = max(candidates, key=lambda i: (weight[i], -i))
        halves: tuple[list[int], list[int]] = ([], [])
        loads = [0.0, 0.0]
        for index in sorted(bins[heaviest], key=lambda i: (-flops_S[i], i)):
            side = 0 if loads[0] <= loads[1] else 1
            halves[side].append(index)
            loads[side] += float(flops_S[index])
        bins[heaviest], weight[heaviest] = halves[0], loads[0]
        bins.append(halves[1])
        weight.append(loads[1])


def _distribute(bins: list[list[int]], *, flops_S: NDArray[np.float64], num_ranks: int) -> list[list[list[int]]]:
    weight = np.asarray([flops_S[b].sum() for b in bins])
    order = np.argsort(-weight, kind="stable")
    load = np.zeros(num_ranks)
    slots: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(bins), num_ranks):
        for bin_id, rank in zip(order[start : start + num_ranks], np.argsort(load, kind="stable"), strict=True):
            slots[rank].append(bins[bin_id])
            load[rank] += weight[bin_id]
    return slots
