"""Per-token advantages and value targets from a critic: GAE and V-trace, whitening; numpy float64 on the CPU.

Inputs are flat packed tokens ``[T]`` with ``seq_id_T`` ascending. ``action_mask_T`` is true at the tokens that the
policy sampled, stale ones included; prompt, tool text and padding are false and are skipped: the recursion goes from
one action to the next, whatever masked positions hold. The last action of a sequence is terminal, also when a length
limit cut the answer; nothing is ever bootstrapped from beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Estimate:
    """``adv_T`` and ``return_T`` (the critic's target), float64 ``[T]``, 0 at masked positions."""

    adv_T: Floats
    return_T: Floats


@dataclass(frozen=True)
class _Actions:
    """The unmasked positions: where they are, which end their sequence, and the actions of each sequence."""

    position_A: NDArray[np.int64]
    is_last_A: Bools
    count_S: NDArray[np.int64]

    def gather(self, x_T: ArrayLike) -> Floats:
        return np.asarray(x_T, dtype=np.float64)[self.position_A]

    def scatter(self, x_A: Floats, *, num_tokens: int) -> Floats:
        x_T = np.zeros(num_tokens)
        x_T[self.position_A] = x_A
        return x_T

    def following(self, x_A: Floats) -> Floats:
        """The value at the next action of the same sequence, 0 after the last."""
        shifted_A = np.zeros_like(x_A)
        shifted_A[:-1] = x_A[1:]
        return np.where(self.is_last_A, 0.0, shifted_A)


def _actions(action_mask_T: ArrayLike, seq_id_T: ArrayLike) -> _Actions:
    seq_id = np.asarray(seq_id_T, dtype=np.int64)
    assert (np.diff(seq_id) >= 0).all(), "tokens of a sequence must be contiguous and sequences in ascending order"
    position_A = np.flatnonzero(np.asarray(action_mask_T, dtype=np.bool_))
    owner_A = seq_id[position_A]
    _, count_S = np.unique(owner_A, return_counts=True)
    return _Actions(position_A, np.append(np.diff(owner_A) != 0, True)[: owner_A.size], count_S)


def _backward_scan(x_A: Floats, decay_A: Floats, count_S: NDArray[np.int64]) -> Floats:
    """``y_t = x_t + decay_t y_{t+1}`` inside each sequence, all sequences side by side."""
    y_A = np.zeros_like(x_A)
    if not count_S.size:
        return y_A
    end_S = np.cumsum(count_S)
    order = np.argsort(-count_S, kind="stable")
    last_S, ascending = end_S[order] - 1, np.sort(count_S)
    carry_S = np.zeros(count_S.size)
    for step in range(int(ascending[-1])):
        active = count_S.size - int(np.searchsorted(ascending, step, side="right"))
        at = last_S[:active] - step
        carry_S[:active] = x_A[at] + decay_A[at] * carry_S[:active]
        y_A[at] = carry_S[:active]
    return y_A


def _require_finite(
    name: str, x_A: Floats, actions: _Actions, seq_id_T: ArrayLike, trajectory_ids: Sequence[str] | None
) -> None:
    bad_A = np.flatnonzero(~np.isfinite(x_A))
    if bad_A.size:
        sequence = int(np.asarray(seq_id_T)[actions.position_A[bad_A[0]]])
        label = trajectory_ids[sequence] if trajectory_ids is not None else f"number {sequence} of the batch"
        raise ValueError(f"{name} is {x_A[bad_A[0]]} at an action of trajectory {label}: quarantine it")


def gae(
    *,
    reward_T: ArrayLike,
    value_T: ArrayLike,
    action_mask_T: ArrayLike,
    seq_id_T: ArrayLike,
    gamma: float = 1.0,
    lam: float = 1.0,
    trajectory_ids: Sequence[str] | None = None,
) -> Estimate:
    """Generalised advantage estimation (arXiv 1506.02438).

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lam A_{t+1}``, return ``A_t + V_t``, with t+1
    the next action. lam = 1 is Monte Carlo: low bias, high variance. Raises ValueError naming the trajectory for a
    non-finite reward or value at an action.
    """
    actions = _actions(action_mask_T, seq_id_T)
    reward_A, value_A = actions.gather(reward_T), actions.gather(value_T)
    _require_finite("reward", reward_A, actions, seq_id_T, trajectory_ids)
    _require_finite("value", value_A, actions, seq_id_T, trajectory_ids)
    delta_A = reward_A + gamma * actions.following(value_A) - value_A
    adv_A = _backward_scan(delta_A, np.full_like(delta_A, gamma * lam), actions.count_S)
    num = np.asarray(reward_T).shape[0]
    return Estimate(actions.scatter(adv_A, num_tokens=num), actions.scatter(adv_A + value_A, num_tokens=num))


def vtrace(
    *,
    reward_T: ArrayLike,
    value_T: ArrayLike,
    log_rho_T: ArrayLike,
    action_mask_T: ArrayLike,
    seq_id_T: ArrayLike,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    dead_band: float = 0.05,
    trajectory_ids: Sequence[str] | None = None,
) -> Estimate:
    """V-trace targets (IMPALA, arXiv 1802.01561) for stale data; ``log_rho_T`` = log pi_proximal - log pi_behaviour.

    ``rho_t = min(rho_bar, e^log_rho)``, ``c_t = lam min(c_bar, e^log_rho)``,
    ``v_t - V_t = rho_t delta_t + gamma c_t (v_{t+1} - V_{t+1})`` with delta as in ``gae``; return ``v_t``.
    The advantage is ``delta_t + gamma lam (v_{t+1} - V_{t+1})``, without ``rho_t``: the loss applies that weight.
    Where ``|log_rho| <= dead_band`` the ratio counts as 1: otherwise the product of many ``min(1, .)`` of engine noise
    would cut every long trace. On such data both results equal GAE's.
    """
    actions = _actions(action_mask_T, seq_id_T)
    reward_A, value_A, log_rho_A = (actions.gather(x) for x in (reward_T, value_T, log_rho_T))
    for name, x_A in (("reward", reward_A), ("value", value_A), ("log_rho", log_rho_A)):
        _require_finite(name, x_A, actions, seq_id_T, trajectory_ids)
    ratio_A = np.exp(np.clip(np.where(np.abs(log_rho_A) <= dead_band, 0.0, log_rho_A), -20.0, 20.0))
    rho_A, c_A = np.minimum(rho_bar, ratio_A), lam * np.minimum(c_bar, ratio_A)
    delta_A = reward_A + gamma * actions.following(value_A) - value_A
    excess_A = _backward_scan(rho_A * delta_A, gamma * c_A, actions.count_S)
    adv_A = delta_A + gamma * lam * actions.following(excess_A)
    num = np.asarray(reward_T).shape[0]
    return Estimate(actions.scatter(adv_A, num_tokens=num), actions.scatter(value_A + excess_A, num_tokens=num))


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of unmasked values; ``+`` joins those of micro-batches and ranks."""

    count: float
    total: float
    square: float

    @classmethod
    def of(cls, x_T: ArrayLike, mask_T: ArrayLike) -> Moments:
        x = np.asarray(x_T, dtype=np.float64)[np.asarray(mask_T, dtype=np.bool_)]
        return cls(float(x.size), float(x.sum()), float((x * x).sum()))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.square + other.square)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return float(np.sqrt(max(0.0, self.square / self.count - self.mean**2))) if self.count else 0.0


def whiten(x_T: ArrayLike, *, mask_T: ArrayLike, moments: Moments | None = None, eps: float = 1e-6) -> Floats:
    """``(x - mean) / (std + eps)`` at unmasked positions, 0 elsewhere, ``[T]``.

    ``moments`` are those of the whole batch over all ranks; left out, those of ``x_T`` itself.
    """
    mask = np.asarray(mask_T, dtype=np.bool_)
    stats = moments or Moments.of(x_T, mask)
    x = np.where(mask, np.asarray(x_T, dtype=np.float64), 0.0)
    return np.where(mask, (x - stats.mean) / (stats.std + eps), 0.0)
