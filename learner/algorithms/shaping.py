"""Rewards before advantages: length penalties, truncated answers, token rewards with the reference KL. numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def soft_overlong_penalty(length_S: ArrayLike, *, max_length: int, buffer_tokens: int, penalty: float = 1.0) -> Floats:
    """What to add to the reward of each answer, ``[S]``, in ``[-penalty, 0]`` (DAPO, arXiv 2503.14476, equation 13).

    0 up to ``max_length - buffer_tokens``, then falling linearly to ``-penalty`` at ``max_length`` and beyond.
    """
    if not 0 < buffer_tokens <= max_length:
        raise ValueError(f"overlong buffer must be in 1..{max_length} (the longest answer), got {buffer_tokens}")
    excess_S = np.asarray(length_S, dtype=np.float64) - (max_length - buffer_tokens)
    return -penalty * np.clip(excess_S / buffer_tokens, 0.0, 1.0)


def overlong_filter(truncated_S: ArrayLike, *, seq_id_T: ArrayLike, mask_T: ArrayLike) -> NDArray[np.bool_]:
    """``mask_T`` without the tokens of answers that the length limit cut.

    They leave the loss, numerator and denominator; their rewards stay in the group baseline.
    """
    truncated = np.asarray(truncated_S, dtype=np.bool_)
    return np.asarray(mask_T, dtype=np.bool_) & ~truncated[np.asarray(seq_id_T, dtype=np.int64)]


def token_rewards(
    score_S: ArrayLike,
    *,
    action_mask_T: ArrayLike,
    seq_id_T: ArrayLike,
    kl_T: ArrayLike | None = None,
    kl_coef: float = 0.0,
) -> Floats:
    """Reward of each token, ``[T]``: ``-kl_coef kl_t`` at every action and the score at the last one; 0 elsewhere.

    A truncated answer gets its score where it was cut. Raises ValueError for a sequence without an action.
    """
    mask = np.asarray(action_mask_T, dtype=np.bool_)
    seq_id = np.asarray(seq_id_T, dtype=np.int64)
    score = np.asarray(score_S, dtype=np.float64)
    last_S = np.full(score.size, -1)
    last_S[seq_id[mask]] = np.flatnonzero(mask)  # the last assignment to an index wins
    if (last_S < 0).any():
        raise ValueError(f"sequence {int(np.flatnonzero(last_S < 0)[0])} has no sampled token: refuse it earlier")
    reward_T = np.zeros(mask.size)
    if kl_T is not None and kl_coef:
        reward_T = np.where(mask, -kl_coef * np.where(mask, np.asarray(kl_T, dtype=np.float64), 0.0), 0.0)
    reward_T[last_S] += score
    return reward_T
