"""Exchanges between the most and the least loaded rank that lower the load of the former.

Every exchange is checked against the token cap before it is made and strictly lowers the larger of the two loads, so
the search ends and never breaks the plan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOOD_ENOUGH = 1.005
"""Max over mean of the ranks' FLOPs at which the search stops."""
MAX_EXCHANGES = 64

Slots = list[list[list[int]]]


def refine(slots: Slots, *, length_S: NDArray[np.int64], flops_S: NDArray[np.float64], max_tokens: int) -> None:
    """Balance ``slots[rank][slot]`` (lists of sequence indices) over ranks, in place."""
    if len(slots) == 1:
        return
    load = np.asarray([[flops_S[micro_batch].sum() for micro_batch in rank] for rank in slots])
    for exchange in (_exchange_micro_batches, _exchange_sequences):
        for _ in range(MAX_EXCHANGES):
            totals = load.sum(axis=1)
            if totals.max() <= GOOD_ENOUGH * totals.mean():
                return
            if not exchange(slots, load, length_S=length_S, flops_S=flops_S, max_tokens=max_tokens):
                break


def _exchange_micro_batches(
    slots: Slots,
    load: NDArray[np.float64],
    *,
    length_S: NDArray[np.int64],
    flops_S: NDArray[np.float64],
    max_tokens: int,
) -> bool:
    """Swap the slot's two micro-batches whose difference is nearest to half the gap."""
    totals = load.sum(axis=1)
    high, low = int(totals.argmax()), int(totals.argmin())
    gap = totals[high] - totals[low]
    difference = load[high] - load[low]
    useful = (difference > 1e-9 * gap) & (difference < gap * (1 - 1e-9))
    if not useful.any():
        return False
    slot = int(np.where(useful, np.abs(difference - gap / 2), np.inf).argmin())
    slots[high][slot], slots[low][slot] = slots[low][slot], slots[high][slot]
    load[[high, low], slot] = load[[low, high], slot]
    return True


def _exchange_sequences(
    slots: Slots,
    load: NDArray[np.float64],
    *,
    length_S: NDArray[np.int64],
    flops_S: NDArray[np.float64],
    max_tokens: int,
) -> bool:
    """Move a sequence from the most to the least loaded rank, or swap two, within the cap."""
    totals = load.sum(axis=1)
    high, low = int(totals.argmax()), int(totals.argmin())
    gap = totals[high] - totals[low]

    # Partner -1 with length and FLOPs 0 stands for "nothing comes back", one for each micro-batch of the low rank.
    give = [(slot, i) for slot, m in enumerate(slots[high]) for i in m]
    take = [(slot, i) for slot, m in enumerate(slots[low]) for i in (*m, -1)]
    give_slot, give_seq = np.asarray(give).T
    take_slot, take_seq = np.asarray(take).T
    take_length = np.where(take_seq >= 0, length_S[take_seq], 0)
    take_flops = np.where(take_seq >= 0, flops_S[take_seq], 0.0)
    room_high = np.asarray([max_tokens - length_S[m].sum() for m in slots[high]])
    room_low = np.asarray([max_tokens - length_S[m].sum() for m in slots[low]])

    growth = length_S[give_seq][:, None] - take_length[None, :]  # tokens that the low rank's micro-batch gains
    difference = flops_S[give_seq][:, None] - take_flops[None, :]
    fits = (growth <= room_low[take_slot][None, :]) & (-growth <= room_high[give_slot][:, None])
    useful = fits & (difference > 1e-9 * gap) & (difference < gap * (1 - 1e-9))
    emptied = np.asarray([len(slots[high][slot]) == 1 for slot in give_slot])
    useful &= ~(emptied[:, None] & (take_seq < 0)[None, :])  # a micro-batch must not become a dummy
    if not useful.any():
        return False
    score = np.where(useful, np.abs(difference - gap / 2), np.inf)
    row, column = np.unravel_index(int(score.argmin()), score.shape)
    from_slot, to_slot, seq, partner = give_slot[row], take_slot[column], int(give_seq[row]), int(take_seq[column])
    slots[high][from_slot].remove(seq)
    slots[low][to_slot].append(seq)
    if partner >= 0:
        slots[low][to_slot].remove(partner)
        slots[high][from_slot].append(partner)
    load[high, from_slot] -= difference[row, column]
    load[low, to_slot] += difference[row, column]
    return True
