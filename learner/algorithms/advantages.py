"""Advantages that are one number per sequence, by name in ``ADVANTAGES``; numpy float64 on the CPU.

Inputs are per sequence, ``[S]``: ``reward_S``, ``group_S`` (any integers; equal for the answers to one prompt) and
``length_S`` (sampled tokens). A length-limited answer is terminal: its reward counts as it stands and nothing is
bootstrapped. With a group baseline, a group in which all rewards are equal, or of a single answer, gets exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class AdvantageOptions:
    """``norm_by_std``: GRPO's division; ``passk_k``: k of grpo_passk, 0 = group size; ``baseline_reward``: ReMax's.

    ``baseline_reward`` maps a group to the reward of its greedy answer.
    """

    norm_by_std: bool = True
    eps: float = 1e-6
    passk_k: int = 0
    baseline_reward: Mapping[int, float] | None = None


AdvantageFn = Callable[[Floats, Ints, Ints, AdvantageOptions], Floats]
ADVANTAGES: dict[str, AdvantageFn] = {}


def _register(name: str) -> Callable[[AdvantageFn], AdvantageFn]:
    def put(fn: AdvantageFn) -> AdvantageFn:
        ADVANTAGES[name] = fn
        return fn

    return put


def compute_advantages(
    name: str,
    *,
    reward_S: ArrayLike,
    group_S: ArrayLike,
    length_S: ArrayLike,
    options: AdvantageOptions | None = None,
) -> Floats:
    """Advantages ``[S]`` by the estimator ``name``. Raises ValueError for unknown names and non-finite rewards."""
    if name not in ADVANTAGES:
        raise ValueError(f"unknown advantage {name!r}; per-sequence estimators are {', '.join(ADVANTAGES)}")
    reward = np.asarray(reward_S, dtype=np.float64)
    group = np.asarray(group_S, dtype=np.int64)
    length = np.asarray(length_S, dtype=np.int64)
    if not reward.shape == group.shape == length.shape or reward.ndim != 1:
        raise ValueError(f"rewards {reward.shape}, groups {group.shape} and lengths {length.shape} must be equal [S]")
    if not np.isfinite(reward).all():
        bad = int(np.flatnonzero(~np.isfinite(reward))[0])
        raise ValueError(f"reward of sequence {bad} (group {group[bad]}) is {reward[bad]}: it must not be trained")
    return ADVANTAGES[name](reward, group, length, options or AdvantageOptions())


def _groups(group_S: Ints) -> Iterator[Ints]:
    order = np.argsort(group_S, kind="stable")
    if order.size:
        yield from np.split(order, np.flatnonzero(np.diff(group_S[order])) + 1)


def _without_signal(reward: Floats) -> bool:
    return bool((reward == reward[0]).all())


@_register("grpo")
def grpo(reward_S: Floats, group_S: Ints, length_S: Ints, options: AdvantageOptions) -> Floats:
    """``(R - mean_g) / (std_g + eps)`` with the sample deviation (n - 1); arXiv 2402.03300."""
    adv_S = np.zeros_like(reward_S)
    for g in _groups(group_S):
        reward = reward_S[g]
        if _without_signal(reward):
            continue
        adv_S[g] = reward - reward.mean()
        if options.norm_by_std:
            adv_S[g] /= reward.std(ddof=1) + options.eps
    return adv_S


@_register("dr_grpo")
def dr_grpo(reward_S: Floats, group_S: Ints, length_S: Ints, options: AdvantageOptions) -> Floats:
    """``R - mean_g``, no division; arXiv 2503.20783. Use with aggregation ``seq_sum_over_constant``."""
    adv_S = np.zeros_like(reward_S)
    for g in _groups(group_S):
        if not _without_signal(reward_S[g]):
            adv_S[g] = reward_S[g] - reward_S[g].mean()
    return adv_S


@_register("rloo")
def rloo(reward_S: Floats, group_S: Ints, length_S: Ints, options: AdvantageOptions) -> Floats:
    """``R_i - mean of the others = n / (n - 1) (R_i - mean_g)``; arXiv 2402.14740."""
    adv_S = np.zeros_like(reward_S)
    for g in _groups(group_S):
        if not _without_signal(reward_S[g]):
            adv_S[g] = (reward_S[g] - reward_S[g].mean()) * (g.size / (g.size - 1))
    return adv_S


@_register("opo")
def opo(reward_S: Floats, group_S: Ints, length_S: Ints, options: AdvantageOptions) -> Floats:
    """``R - sum(len R) / sum(len)`` over the group, the variance-optimal baseline; arXiv 2505.23585."""
    adv_S = np.zeros_like(reward_S)
    for g in _groups(group_S):
        if not _without_signal(reward_S[g]):
            adv_S[g] = reward_S[g] - np.average(reward_S[g], weights=np.maximum(length_S[g], 1))
    return adv_S


@_register("grpo_passk")
def grpo_passk(reward_S: Floats, group_S: Ints, length_S: Ints, options: AdvantageOptions) -> Floats:
    """What an answer adds to the best of k: mean of ``(R_i - max of k - 1 others)+`` over all choices of the others.

    With k the group size it is best minus second best, to the best only (arXiv 2503.19595); in general the
    leave-one-out estimator of arXiv 2505.15201 without its factor k / n. A group left with fewer than k answers uses
    its own size.
    """
    if options.passk_k == 1:
        raise ValueError("passk_k must be at least 2, or 0 for the group size: k = 1 is the plain reward, use rloo")
    adv_S = np.zeros_like(reward_S)
    for g in _groups(group_S):
        n, k = g.size, min(options.passk_k or g.size, g.size)
        if _without_signal(reward_S[g]):
            continue
        order = g[np.argsort(reward_S[g], kind="stable")]
        sorted_reward = reward_S[order]
        # The j-th smallest (0-based) of the n - 1 others is the largest of k - 1 of them in comb(j, k - 2) choices.
        share = np.asarray([comb(j, k - 2) for j in range(n - 1)]) / comb(n - 1, k - 1)
        for rank in range(n):
            below = sorted_reward[rank] - sorted_reward[:rank]
            adv_S[order[rank]] = float((share[:rank] * below).sum())
    return adv_S


@_register("remax")
def remax(reward_S: Floats, group_S: Ints, length_S: Ints, options: AdvantageOptions) -> Floats:
    """``R - R(greedy answer of the prompt)``; arXiv 2310.10505."""
    if options.baseline_reward is None:
        raise ValueError("remax needs baseline_reward: the reward of each group's greedy answer")
    missing = sorted(set(group_S.tolist()) - set(options.baseline_reward))
    if missing:
        raise ValueError(f"remax has no baseline reward for group {missing[0]} ({len(missing)} groups without)")
    return reward_S - np.asarray([options.baseline_reward[g] for g in group_S.tolist()], dtype=np.float64)


def _whiten_by_tokens(x_S: Floats, length_S: Ints, eps: float) -> Floats:
    """``(x - mean) / (std + eps)`` with every sequence counted once per token."""
    if not x_S.size or _without_signal(x_S):
        return np.zeros_like(x_S)
    weight_S = np.maximum(length_S, 1)
    centred_S = x_S - np.average(x_S, weights=weight_S)
    return centred_S / (np.sqrt(np.average(centred_S**2, weights=weight_S)) + eps)


@_register("reinforce_pp")
def reinforce_pp(reward_S: Floats, group_S: Ints, length_S: Ints, options: AdvantageOptions) -> Floats:
    """Returns (gamma 1) whitened over the tokens of the whole batch; arXiv 2501.03262."""
    return _whiten_by_tokens(reward_S, length_S, options.eps)


@_register("reinforce_pp_baseline")
def reinforce_pp_baseline(reward_S: Floats, group_S: Ints, length_S: Ints, options: AdvantageOptions) -> Floats:
    """``R - mean_g``, then whitened over the tokens of the whole batch; arXiv 2501.03262."""
    return _whiten_by_tokens(dr_grpo(reward_S, group_S, length_S, options), length_S, options.eps)
