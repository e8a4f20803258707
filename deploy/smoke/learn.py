"""The learner alone, on one rank: load, a full-length batch forwards and backwards, an optimizer step, a snapshot."""

import math
import time
from collections.abc import Iterator

import numpy as np

from learner.trainer.batch import TrainBatch, TrajectoryArrays
from learner.trainer.engine import TrainerEngine, choose_device
from protocol.config import Config
from protocol.config.checks import max_response_tokens
from protocol.errors import ExitStatus, UserError
from protocol.messages import BatchItem, BatchPlan

NUM_ANSWERS = 2


def smoke_learn(config: Config) -> Iterator[str]:
    """Yields a line per thing that works.

    Raises:
        UserError: the update was not applied or its figures are not finite.
    """
    started = time.monotonic()
    engine = TrainerEngine(config, rank=0, num_ranks=1, device=choose_device(config, rank=0))
    yield f"{config.model.path} loaded in {time.monotonic() - started:.1f} s on {engine.device}"
    try:
        started = time.monotonic()
        result = engine.train_batch(_batch(config))
        if not result.num_applied or not all(math.isfinite(value) for value in result.metrics.values()):
            raise UserError(f"learn: the update was not applied: {result.metrics}", status=ExitStatus.NO_PROGRESS)
        length = config.data.max_prompt_tokens + max_response_tokens(config)
        seconds = time.monotonic() - started
        yield f"an update on {NUM_ANSWERS} answers of the longest length, {length} tokens, in {seconds:.1f} s"
        snapshot = engine.gather_snapshot()
        num = len(snapshot.tensors) if snapshot is not None else 0
        yield f"version {engine.policy_version} gathered: {num} tensors"
    finally:
        engine.close()


def _batch(config: Config) -> TrainBatch:
    """Answers of the longest length, one right and one wrong, each a micro-batch of its own."""
    num_prompt, num_response = config.data.max_prompt_tokens, max_response_tokens(config)
    items = [
        BatchItem(
            group_id=0,
            slot=slot,
            prompt_id="smoke",
            data_source="smoke",
            num_prompt_tokens=num_prompt,
            num_response_tokens=num_response,
            score=float(slot % 2),
            verdict="correct" if slot % 2 else "wrong",
            finish_reason="stop",
            min_version=0,
            max_version=0,
            temperature=config.sampling.temperature,
            stage=0,
        )
        for slot in range(NUM_ANSWERS)
    ]
    draw = np.random.default_rng(config.run.seed)
    prompt = draw.integers(0, 256, num_prompt)
    arrays = {
        slot: TrajectoryArrays(
            token_ids=np.concatenate([prompt, draw.integers(0, 256, num_response)]).astype(np.int32),
            logp_behaviour=np.full(num_response, -6.0, np.float32),
            versions=np.zeros(num_response, np.int32),
            loss_mask=np.ones(num_response, np.uint8),
        )
        for slot in range(NUM_ANSWERS)
    }
    plan = BatchPlan(
        batch_id=1,
        policy_version=0,
        stage=0,
        items=items,
        micro_batches=[[[slot] for slot in range(NUM_ANSWERS)]],
        fill_fraction=1.0,
        oldest_age_s=0.0,
    )
    return TrainBatch(plan=plan, arrays=arrays)
