"""Learning rate as a function of the policy version, so that skipped updates do not move it."""

from __future__ import annotations

import math

from protocol.config.learner import OptimSection


def learning_rate(optim: OptimSection, *, policy_version: int, max_updates: int) -> float:
    """Learning rate of the update that starts from ``policy_version`` (0-based).

    Linear warm-up over ``warmup_updates`` updates, of which the first has lr / warmup_updates and never 0; then
    constant, or linear or cosine decay that reaches ``min_lr_ratio * lr`` at ``max_updates``.
    """
    if policy_version < optim.warmup_updates:
        return optim.lr * (policy_version + 1) / optim.warmup_updates
    if optim.schedule == "constant":
        return optim.lr
    span = max(1, max_updates - optim.warmup_updates)
    progress = min(1.0, (policy_version - optim.warmup_updates) / span)
    share = 1.0 - progress if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share)
