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
    """`slot_tokens_per_s`: sampling rate of each running slot; `num_slots`: slots it runs at once."""

    slot_tokens_per_s: float
    num_slots: int


@dataclass(frozen=True)
class Setup:
    """A run to simulate. Lengths are lognormal: `median_tokens`, and `p99_over_median`; times are in seconds."""

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
    heartbeat_s: float = 1.0
    lease_deadline_s: float = 120.0
    retry_s: float = 0.5
    seed: int = 0


def length_table(setup: Setup) -> NDArray[np.int64]:
    """Tokens of every answer [num_prompts, group_size], lognormal, at most max_response_tokens."""
    sigma = np.log(setup.p99_over_median) / 2.3263478740408408  # the 99 % quantile of the normal distribution
    generator = np.random.default_rng(setup.seed)
    lengths = np.exp(
        np.log(setup.median_tokens) + sigma * generator.standard_normal((setup.num_prompts, setup.group_size))
    )
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
