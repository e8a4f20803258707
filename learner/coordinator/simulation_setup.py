"""What is simulated: generators, lengths of answers, prompts and the coordinator's configuration."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from learner.data import Prompt, PromptSet
from protocol.config import Config

PROMPT_TOKENS = 16


@dataclass(frozen=True)
class SimulatedGenerator:
    """An engine that samples one token per step for each of at most `num_slots` running slots.

    `slot_tokens_per_s` is the rate of each slot when all run. A step with r of n slots takes
    ``(fixed_share + (1 - fixed_share) r / n) / slot_tokens_per_s``: `fixed_share` is the part of a full step that does
    not depend on how many run (nearly 1 on GPUs, where reading the weights dominates, less on CPUs). A request's first
    token comes `prefill_steps` later than a step.
    """

    slot_tokens_per_s: float
    num_slots: int
    fixed_share: float = 1.0
    prefill_steps: float = 0.0

    def steps_per_s(self, num_running: int) -> float:
        return self.slot_tokens_per_s / (self.fixed_share + (1.0 - self.fixed_share) * num_running / self.num_slots)


@dataclass(frozen=True)
class Setup:
    """A run to simulate. Times are in seconds.

    Lengths are drawn from `lengths`, or lognormal with `median_tokens` and `p99_over_median`. The trainer asks for a
    batch `between_s` after the one before. Each of `num_rewardd` daemons scores `rewardd_answers_per_s`, one after
    another (0: in no time).
    """

    generators: tuple[SimulatedGenerator, ...]
    num_prompts: int = 1000
    group_size: int = 4
    groups_per_batch: int = 32
    max_staleness: int = 2
    median_tokens: float = 200.0
    p99_over_median: float = 20.0
    max_response_tokens: int = 16_384
    train_tokens_per_s: float = 50_000.0
    publish_s: float = 1.0
    between_s: float = 0.0
    heartbeat_s: float = 1.0
    lease_deadline_s: float = 120.0
    retry_s: float = 0.5
    seed: int = 0
    lengths: tuple[int, ...] = ()
    num_rewardd: int = 1
    rewardd_answers_per_s: float = 0.0


def length_table(setup: Setup) -> NDArray[np.int64]:
    """Tokens of every answer [num_prompts, group_size], at most max_response_tokens."""
    shape = (setup.num_prompts, setup.group_size)
    if setup.lengths:
        drawn = np.random.default_rng(setup.seed).choice(np.asarray(setup.lengths, dtype=np.int64), size=shape)
        return np.clip(drawn, 1, setup.max_response_tokens)
    sigma = np.log(setup.p99_over_median) / 2.3263478740408408  # the 99 % quantile of the normal distribution
    generator = np.random.default_rng(setup.seed)
    lengths = np.exp(np.log(setup.median_tokens) + sigma * generator.standard_normal(shape))
    return np.clip(lengths, 1, setup.max_response_tokens).astype(np.int64)


def simulated_prompts(number: int) -> PromptSet:
    """That many prompts of 16 tokens."""
    ids = np.full(PROMPT_TOKENS, 3, dtype=np.int32)
    prompts = [Prompt(f"p{i}", "simulated", "math", ids, "{}", b"") for i in range(number)]
    return PromptSet(prompts=prompts, content_hash="simulated")


def config_of(setup: Setup, folder: Path) -> Config:
    """The configuration of the coordinator in the simulation."""
    return Config.model_validate(
        {
            "run": {"dir": str(folder), "max_passes": 1, "max_updates": setup.num_prompts, "seed": setup.seed},
            "model": {"path": str(folder)},
            "data": {"train_files": []},
            "sampling": {"max_response_tokens": setup.max_response_tokens},
            "algorithm": {"max_staleness": setup.max_staleness},
            "learner": {
                "groups_per_batch": setup.groups_per_batch,
                "group_size": setup.group_size,
                "max_tokens_per_micro_batch": setup.max_response_tokens + PROMPT_TOKENS,
            },
            "evaluation": {"at_start": False, "at_end": False},
            "coordinator": {"lease_deadline_s": setup.lease_deadline_s, "lease_max_s": 1e9},
            "transport": {"heartbeat_s": setup.heartbeat_s, "peer_timeout_s": 10 * setup.heartbeat_s},
        }
    )
