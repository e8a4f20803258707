"""Batches of made-up trajectories and a trainer configuration for the tiny model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from learner.trainer.batch import TrainBatch, TrajectoryArrays
from protocol.config import Config
from protocol.messages import BatchItem, BatchPlan


def tiny_config(model_path: Path, run_dir: Path, **sections: dict[str, Any]) -> Config:
    """Float32 on one CPU thread, lr large enough to see; `sections` are merged over it, two levels deep."""
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": str(run_dir), "max_updates": 10},
        "model": {"path": str(model_path), "dtype": "float32", "gradient_checkpointing": False},
        "data": {"train_files": ["none.jsonl"]},
        "sampling": {"max_response_tokens": 32},
        "learner": {
            "groups_per_batch": 4,
            "group_size": 2,
            "logprob_chunk_tokens": 16,
            "optim": {"lr": 1e-3, "eps": 1e-5},
        },
        "trainer": {"device": "cpu", "threads_per_rank": 1, "collective_timeout_s": 60.0},
    }
    for name, values in sections.items():
        section = base.setdefault(name, {})
        for key, value in values.items():
            section[key] = section[key] | value if isinstance(value, dict) and key in section else value
    return Config.model_validate(base)


def make_items(*, num_groups: int = 4, group_size: int = 2, seed: int = 0, temperature: float = 0.8) -> list[BatchItem]:
    """Items with lengths, scores in {0, 1} (both in every group) and versions drawn from `seed`."""
    rng = np.random.default_rng(seed)
    items = []
    for group in range(num_groups):
        num_prompt = int(rng.integers(1, 9))
        for slot in range(group_size):
            items.append(
                BatchItem(
                    group_id=group,
                    slot=slot,
                    prompt_id=f"p{group}",
                    data_source="made-up",
                    num_prompt_tokens=num_prompt,
                    num_response_tokens=int(rng.integers(1, 25)),
                    score=float(slot % 2),
                    verdict="correct" if slot % 2 else "wrong",
                    finish_reason="stop",
                    min_version=0,
                    max_version=0,
                    temperature=temperature,
                    stage=0,
                )
            )
    return items


def make_arrays(items: Sequence[BatchItem], *, seed: int = 0, version: int = 0) -> dict[int, TrajectoryArrays]:
    """Random byte tokens, one prompt per group; behaviour log-probs near those of a nearly uniform policy."""
    rng = np.random.default_rng(seed + 1)
    arrays = {}
    prompts: dict[int, np.ndarray] = {}
    for index, item in enumerate(items):
        num_response = item.num_response_tokens
        prompt = prompts.setdefault(item.group_id, rng.integers(0, 256, item.num_prompt_tokens))
        arrays[index] = TrajectoryArrays(
            token_ids=np.concatenate([prompt, rng.integers(0, 256, num_response)]).astype(np.int32),
            logp_behaviour=rng.uniform(-7.0, -4.5, num_response).astype(np.float32),
            versions=np.full(num_response, version, np.int32),
            loss_mask=np.ones(num_response, np.uint8),
        )
    return arrays


def make_batch(
    *,
    micro_batches: list[list[list[int]]],
    batch_id: int = 1,
    policy_version: int = 0,
    items: Sequence[BatchItem] | None = None,
    arrays: dict[int, TrajectoryArrays] | None = None,
    seed: int = 0,
) -> TrainBatch:
    """A batch with this split; by default 4 groups of 2 and every rank's arrays."""
    items = list(items) if items is not None else make_items(seed=seed)
    plan = BatchPlan(
        batch_id=batch_id,
        policy_version=policy_version,
        stage=0,
        items=items,
        micro_batches=micro_batches,
        fill_fraction=1.0,
        oldest_age_s=0.0,
    )
    return TrainBatch(plan=plan, arrays=arrays or make_arrays(items, seed=seed, version=policy_version))
