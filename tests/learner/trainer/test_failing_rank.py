"""What only one rank sees breaks no collective: all ranks drop the step together, or raise together."""

import numpy as np
import pytest
import torch

from learner.trainer import rewards
from learner.trainer.engine import TrainerEngine
from tests.learner.trainer.ranks import run_ranks
from tests.support.tiny_model import build_tiny_model
from tests.support.training import make_batch, tiny_config

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SPLIT = [[[5, 0], [1, 2]], [[3, 4, 6, 7], []]]


def broken_on_rank_1(rank, num_ranks, config):
    """Three batches with something broken on rank 1 only, then a good one; what each gave on this rank."""
    engine = TrainerEngine(config, rank=rank, num_ranks=num_ranks, device=torch.device("cpu"))
    outcomes = []

    def train(batch):
        try:
            result = engine.train_batch(batch)
            outcomes.append((result.num_applied, result.num_skipped, result.policy_version))
        except ValueError as error:
            outcomes.append(str(error))

    missing = make_batch(micro_batches=SPLIT)
    if rank == 1:
        missing.arrays[3].logp_behaviour[0] = np.nan
    train(missing)

    advantages = rewards.advantages
    if rank == 1:
        rewards.advantages = lambda *args, **options: np.full(8, np.inf)
    train(make_batch(micro_batches=SPLIT, batch_id=2))
    rewards.advantages = advantages

    norm = engine._reference.module.hf.model.norm.weight
    healthy = norm.detach().clone()
    if rank == 1:
        norm.fill_(float("nan"))
    train(make_batch(micro_batches=SPLIT, batch_id=3))
    norm.copy_(healthy)

    train(make_batch(micro_batches=SPLIT, batch_id=4))
    return outcomes, engine.evaluate(_first_micro_batch())[0]


def _first_micro_batch():
    from learner.trainer.batch import build_micro_batch

    batch = make_batch(micro_batches=SPLIT)
    return build_micro_batch(
        [0, 1], items=batch.plan.items, arrays=batch.arrays, kernel="sdpa", device=torch.device("cpu")
    )


def test_b05_b03_what_breaks_on_one_rank_is_refused_or_skipped_by_all(tmp_path):
    model = build_tiny_model(tmp_path / "model")
    config = tiny_config(model, tmp_path, algorithm={"kl": {"where": "loss", "coef": 0.1}})
    (outcomes0, logp0), (outcomes1, logp1) = run_ranks(broken_on_rank_1, config, num_ranks=2, out=tmp_path)
    assert "other trainer rank" in outcomes0[0] and "behaviour log-prob" in outcomes1[0]
    assert "other trainer rank" in outcomes0[1] and "advantage is inf at token 0 of trajectory 1/1" in outcomes1[1]
    assert outcomes0[2:] == outcomes1[2:] == [(0, 1, 0), (1, 0, 1)]
    assert torch.equal(logp0, logp1) and bool(logp0.isfinite().all())
