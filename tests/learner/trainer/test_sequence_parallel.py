"""Ulysses: packed rows over two ranks equal separate documents on one, in loss, gradient and what is trained."""

import pytest
import torch

from learner.trainer.batch import build_micro_batch
from learner.trainer.engine import TrainerEngine
from tests.learner.trainer.ranks import run_ranks
from tests.support.tiny_model import build_tiny_model
from tests.support.training import make_arrays, make_batch, make_items, tiny_config

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PACKED = [[[0, 1, 2, 3, 4], [5, 6, 7]]]
SEPARATE = [[[i] for i in range(8)]]
SETTINGS = {
    "grpo": {"algorithm": {"kl": {"where": "loss", "coef": 0.1}, "entropy": {"coef": 0.01}}},
    "gae": {"algorithm": {"advantage": "gae", "kl": {"where": "reward", "coef": 0.1}}},
}


def train(rank, num_ranks, configs, split):
    """For each configuration: losses of three updates and the weights after them; then the gradient of a forward."""
    outcome = []
    for config in configs:
        engine = TrainerEngine(config, rank=rank, num_ranks=num_ranks, device=torch.device("cpu"))
        metrics = [
            engine.train_batch(
                make_batch(micro_batches=split, batch_id=step + 1, policy_version=step, seed=step)
            ).metrics
            for step in range(3)
        ]
        snapshot = engine.gather_snapshot()
        outcome.append((metrics, snapshot and snapshot.tensors, engine.evaluate(whole_batch(engine))))
        engine.close()
    return outcome


def whole_batch(engine):
    items = make_items()
    return build_micro_batch(
        range(8),
        items=items,
        arrays=make_arrays(items),
        kernel="sdpa",
        device=torch.device("cpu"),
        multiple_of=engine.ranks.sequence_size,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    model = build_tiny_model(tmp_path_factory.mktemp("model"))
    outcome = {}
    for size, split in ((1, SEPARATE), (2, PACKED)):
        out = tmp_path_factory.mktemp(f"sp{size}")
        configs = [
            tiny_config(model, out, **(sections | {"learner": {"sequence_parallel": size}}))
            for sections in SETTINGS.values()
        ]
        outcome[size] = run_ranks(train, configs, split, num_ranks=size, out=out)
    return outcome


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=list(SETTINGS))
def test_packed_on_two_sequence_parallel_ranks_equals_separate_documents_on_one(runs, number):
    alone, first, second = runs[1][0][number], runs[2][0][number], runs[2][1][number]
    for one, rank0, rank1 in zip(alone[0], first[0], second[0], strict=True):
        compared = [name for name in one if name.startswith(("actor/", "critic/", "staleness/", "importance/"))]
        for name in compared:
            assert rank0[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
            assert rank1[name] == rank0[name], name
    assert [name for name, _ in alone[1]] == [name for name, _ in first[1]]
    for (name, expected), (_, found) in zip(alone[1], first[1], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5, msg=name)


def test_every_rank_of_a_sequence_group_has_the_log_probs_of_all_tokens(runs):
    expected, rank0, rank1 = (outcome[0][2] for outcome in (runs[1][0], runs[2][0], runs[2][1]))
    for one, other, another in zip(expected, rank0, rank1, strict=True):
        assert torch.equal(other, another)
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
