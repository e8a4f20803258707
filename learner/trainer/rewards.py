"""From the batch table to rewards and advantages per sequence. Every rank computes the same numbers from the table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from learner.algorithms.advantages import AdvantageOptions, compute_advantages
from learner.algorithms.shaping import soft_overlong_penalty
from learner.coordinator.stages import StageSchedule
from protocol.config import Config
from protocol.config.learner import AlgorithmSection
from protocol.messages import BatchItem


def rewards(items: Sequence[BatchItem], *, config: Config) -> np.ndarray:
    """Rewards ``[S]`` float64: the score and, when configured, the soft overlong penalty by each answer's stage."""
    algorithm = config.algorithm
    reward_S = np.asarray([item.score for item in items], dtype=np.float64)
    if algorithm.overlong != "soft_penalty":
        return reward_S
    schedule = StageSchedule(config.stages)
    for stage in {item.stage for item in items}:
        own = np.flatnonzero([item.stage == stage for item in items])
        reward_S[own] += soft_overlong_penalty(
            [items[i].num_response_tokens for i in own],
            max_length=schedule.max_response_tokens(stage, config.sampling.max_response_tokens),
            buffer_tokens=algorithm.overlong_buffer_tokens,
            penalty=algorithm.overlong_penalty,
        )
    return reward_S


def excluded_items(items: Sequence[BatchItem], *, algorithm: AlgorithmSection) -> frozenset[int]:
    """Items that keep their part in the group baseline and leave the loss: answers cut by the length limit."""
    if algorithm.overlong != "filter":
        return frozenset()
    return frozenset(i for i, item in enumerate(items) if item.finish_reason == "length")


def advantages(reward_S: np.ndarray, items: Sequence[BatchItem], *, algorithm: AlgorithmSection) -> np.ndarray:
    """Advantages ``[S]`` float64 by ``algorithm.advantage``, whitened over the batch's sequences when asked."""
    adv_S = compute_advantages(
        algorithm.advantage,
        reward_S=reward_S,
        group_S=[item.group_id for item in items],
        length_S=[item.num_response_tokens for item in items],
        options=AdvantageOptions(passk_k=algorithm.passk_k),
    )
    if algorithm.whiten_advantages and len(adv_S) > 1:
        adv_S = (adv_S - adv_S.mean()) / (adv_S.std() + 1e-8)
    return adv_S


def table_metrics(items: Sequence[BatchItem], *, reward_S: np.ndarray) -> dict[str, float]:
    """Metrics that follow from the batch table alone."""
    score_S = np.asarray([item.score for item in items])
    length_S = np.asarray([item.num_response_tokens for item in items])
    groups: dict[int, list[float]] = {}
    sources: dict[str, list[float]] = {}
    for item in items:
        groups.setdefault(item.group_id, []).append(item.score)
        sources.setdefault(item.data_source, []).append(item.score)
    metrics = {
        "critic/score/mean": float(score_S.mean()),
        "critic/score/max": float(score_S.max()),
        "critic/score/min": float(score_S.min()),
        "critic/rewards/mean": float(reward_S.mean()),
        "response_length/mean": float(length_S.mean()),
        "response_length/max": float(length_S.max()),
        "response_length/cut_share": float(np.mean([item.finish_reason == "length" for item in items])),
        "prompt_length/mean": float(np.mean([item.num_prompt_tokens for item in items])),
        "batch/solve_none": float(np.mean([max(scores) <= 0 for scores in groups.values()])),
        "batch/solve_all": float(np.mean([min(scores) >= 1 for scores in groups.values()])),
    }
    metrics |= {f"critic/score/{source or 'unnamed'}/mean": float(np.mean(s)) for source, s in sources.items()}
    return metrics
