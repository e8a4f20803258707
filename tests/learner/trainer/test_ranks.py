"""Two ranks equal one; ranks stay in step; a checkpoint restores exactly on another number of ranks."""

import numpy as np
import pytest
import torch

from learner.checkpoint.store import newest_committed, write_checkpoint
from learner.trainer.batch import TrainBatch
from learner.trainer.engine import TrainerEngine
from learner.trainer.resume import load_checkpoint, save_state
from tests.learner.trainer.ranks import run_ranks
from tests.support.tiny_model import build_tiny_model
from tests.support.training import make_batch, tiny_config

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SPLITS = {1: [[[0, 1, 2], [3, 4], [5, 6, 7]]], 2: [[[5, 0], [1, 2]], [[3, 4, 6, 7], []]]}
"""The second rank's last micro-batch is empty."""


def make_engine(config, rank, num_ranks):
    return TrainerEngine(config, rank=rank, num_ranks=num_ranks, device=torch.device("cpu"))


def train(engine, steps):
    """Trains made-up batches; every rank holds the arrays of its own shard only."""
    results = []
    for step in steps:
        split = SPLITS[engine.num_ranks]
        whole = make_batch(micro_batches=split, batch_id=step + 1, policy_version=step, seed=step)
        own = {i for micro_batch in split[engine.rank] for i in micro_batch}
        results.append(engine.train_batch(TrainBatch(whole.plan, {i: a for i, a in whole.arrays.items() if i in own})))
    return results


def save(engine, root):
    state = save_state(engine, attempt=1)
    if state is not None:
        write_checkpoint(root, state, keep=2)


def train_and_save(rank, num_ranks, config, root, num_steps):
    """Results, weights after `num_steps`, and weights after one update more; a checkpoint between the two."""
    engine = make_engine(config, rank, num_ranks)
    results = train(engine, range(num_steps))
    save(engine, root)
    before = engine.gather_snapshot()
    results += train(engine, [num_steps])
    after = engine.gather_snapshot()
    refused = refuse_on_one_rank(engine)
    return results, before and before.tensors, after and after.tensors, refused


def refuse_on_one_rank(engine):
    """Only rank 0 holds the broken trajectory; what each rank raises."""
    whole = make_batch(micro_batches=SPLITS[engine.num_ranks], batch_id=99)
    whole.arrays[0].logp_behaviour[0] = np.nan
    try:
        engine.train_batch(whole)
    except ValueError as error:
        return str(error)


def resume_and_train(rank, num_ranks, config, root, step):
    engine = make_engine(config, rank, num_ranks)
    load_checkpoint(engine, newest_committed(root))
    before = engine.gather_snapshot()
    results = train(engine, [step])
    after = engine.gather_snapshot()
    return results, before and before.tensors, after and after.tensors


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runs(request, tmp_path_factory):
    """The same three updates on one rank and on two, saved after the second."""
    model = build_tiny_model(tmp_path_factory.mktemp("model"))
    outcome = {"dtype": request.param}
    for num_ranks in (1, 2):
        root = tmp_path_factory.mktemp(f"ranks{num_ranks}")
        config = tiny_config(model, root, model={"dtype": request.param})
        outcome[num_ranks] = (config, root, run_ranks(train_and_save, config, root, 2, num_ranks=num_ranks, out=root))
    return outcome


def distance(one, other):
    assert [name for name, _ in one] == [name for name, _ in other]
    return max(float((a.double() - b.double()).abs().max()) for (_, a), (_, b) in zip(one, other, strict=True))


def test_b04_two_ranks_equal_one(runs):
    (one,), two = runs[1][2], runs[2][2]
    tight = runs["dtype"] == "float32"
    for single, *ranks in zip(one[0], *(rank[0] for rank in two), strict=True):
        for rank in ranks:
            loss = pytest.approx(single.metrics["actor/loss"], abs=1e-6 if tight else 1e-2)
            assert rank.metrics["actor/loss"] == loss
            assert rank.num_trained_tokens == single.num_trained_tokens
    assert distance(two[0][2], one[2]) < (1e-5 if tight else 1e-2)


def test_b05_an_empty_micro_batch_keeps_ranks_in_step_and_a_refusal_reaches_all(runs):
    _, _, (rank0, rank1) = runs[2]
    assert rank0[0] == [r for r in rank0[0]] and len(rank0[0]) == len(rank1[0]) == 3
    assert "behaviour log-prob" in rank0[3]
    assert "other trainer rank" in rank1[3]


@pytest.mark.parametrize(("saved_by", "resumed_by"), [(1, 1), (2, 1), (1, 2)])
def test_b08_resume_is_exact_for_any_number_of_ranks(runs, tmp_path, saved_by, resumed_by):
    config, root, outcome = runs[saved_by]
    (results, before, after), *_ = run_ranks(resume_and_train, config, root, 2, num_ranks=resumed_by, out=tmp_path)
    assert distance(before, outcome[0][1]) == 0.0
    same_split = saved_by == resumed_by
    assert distance(after, outcome[0][2]) <= (0.0 if same_split else 1e-5 if runs["dtype"] == "float32" else 1e-2)
    assert results[0].metrics["actor/lr"] == outcome[0][0][2].metrics["actor/lr"]
    assert results[0].policy_version == 3
