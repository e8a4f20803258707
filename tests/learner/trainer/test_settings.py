"""Every advantage, loss, KL placement and controller through the engine: finite, metrics under the field's names."""

import math

import numpy as np
import pytest
import torch

from learner.algorithms.losses import POLICY_LOSSES
from learner.trainer.resume import load_checkpoint, save_state
from protocol.metrics import unregistered
from tests.support.training import make_batch

pytestmark = pytest.mark.engine

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "opo", "grpo_passk", "gae")
SPLIT = [[[0, 1, 2, 3, 4], [5, 6, 7]]]
FIELD_NAMES = {
    "actor/pg_loss",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/kl_behaviour",
    "actor/grad_norm",
    "actor/lr",
    "critic/score/mean",
    "critic/rewards/mean",
    "response_length/mean",
    "importance/ess",
    "staleness/age_mean",
    "staleness/age_share/0",
    "staleness/age_share/over",
    "actor/ratio_share/lt_1.01",
    "perf/throughput",
}
CRITIC_NAMES = {
    "critic/vf_loss",
    "critic/vf_clipfrac",
    "critic/vpred_mean",
    "critic/returns_mean",
    "critic/vf_explained_var",
    "critic/advantages/mean",
    "critic/grad_norm",
}


def weights(engine):
    return dict(engine.gather_snapshot().tensors)


def train(engine, num=2, **options):
    return [
        engine.train_batch(make_batch(micro_batches=SPLIT, batch_id=i + 1, policy_version=i, seed=i, **options))
        for i in range(num)
    ]


def assert_sound(engine, results):
    assert [(r.num_applied, r.num_skipped) for r in results] == [(engine.config.learner.mini_batches, 0)] * len(results)
    names = FIELD_NAMES | (CRITIC_NAMES if engine.critic is not None else set())
    assert names <= results[-1].metrics.keys() and not unregistered(results[-1].metrics)
    assert all(math.isfinite(value) for value in results[-1].metrics.values())
    assert all(bool(t.isfinite().all()) for t in weights(engine).values())


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_every_advantage_with_every_loss_moves_the_policy(start, advantage, loss):
    engine = start(algorithm={"advantage": advantage, "loss": loss})
    before = weights(engine)
    assert_sound(engine, train(engine))
    assert any(not torch.equal(t, before[name]) for name, t in weights(engine).items())


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("where", ["loss", "reward"])
def test_reference_kl_with_every_estimator_in_loss_and_reward(start, where, estimator, advantage):
    kl = {"where": where, "estimator": estimator, "coef": 0.1, "controller": "adaptive", "target": 1e-6, "horizon": 100}
    engine = start(algorithm={"advantage": advantage, "kl": kl})
    results = train(engine)
    assert_sound(engine, results)
    assert "actor/kl_ref" in results[0].metrics
    assert results[0].metrics["learner/kl_coef"] != 0.1, "the controller moved by the first batch's KL"


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"proximal": "loglinear"}, "learner": {"mini_batches": 2}},
        {"algorithm": {"behaviour": {"level": "geometric", "mode": "mask", "low": 0.1, "high": 10.0}}},
        {"algorithm": {"behaviour": {"level": "sequence"}}},
        {"algorithm": {"behaviour": {"level": "token", "mode": "mask"}, "aggregation": "seq_mean_token_mean"}},
        {"algorithm": {"advantage": "dr_grpo", "aggregation": "seq_sum_over_constant"}},
        {"algorithm": {"entropy": {"controller": "adaptive", "target": 9.0, "coef": 0.001}}},
        {"algorithm": {"overlong": "soft_penalty", "overlong_buffer_tokens": 16, "whiten_advantages": True}},
        {"algorithm": {"advantage": "gae", "vtrace": True, "lam": 0.95}, "learner": {"mini_batches": 2}},
        {"algorithm": {"advantage": "gae", "whiten_advantages": True}, "model": {"gradient_checkpointing": True}},
        {"model": {"gradient_checkpointing": True, "checkpoint_share": 0.5}},
    ],
    ids=lambda sections: str(sections)[:60],
)
def test_other_settings(start, sections):
    engine = start(**sections)
    assert_sound(engine, train(engine))


def test_the_critic_learns_the_scores_and_warms_up_alone(start):
    engine = start(
        algorithm={"advantage": "gae"}, learner={"critic": {"lr": 3e-3, "warmup_updates": 30, "value_clip": 100.0}}
    )
    before = weights(engine)
    results = [engine.train_batch(make_batch(micro_batches=SPLIT, batch_id=i + 1, policy_version=i)) for i in range(30)]
    assert results[0].metrics["critic/vpred_mean"] == 0.0
    assert results[-1].metrics["critic/vf_loss"] < 0.3 * results[0].metrics["critic/vf_loss"]
    assert results[-1].metrics["critic/vf_explained_var"] > 0.5
    assert engine.policy_version == 30 and "actor/pg_loss" not in results[-1].metrics
    assert all(torch.equal(t, before[name]) for name, t in weights(engine).items())
    engine.train_batch(make_batch(micro_batches=SPLIT, batch_id=31, policy_version=30))
    assert any(not torch.equal(t, before[name]) for name, t in weights(engine).items())


def test_b09_with_gamma_and_lambda_1_and_values_0_gae_is_the_plain_reward(start):
    """At the first update the value head is 0: advantages are the scores at every token, whatever was padded."""
    engine = start(algorithm={"advantage": "gae"})
    result = train(engine, 1)[0]
    batch = make_batch(micro_batches=SPLIT)
    lengths = [item.num_response_tokens for item in batch.plan.items]
    mean = np.average([item.score for item in batch.plan.items], weights=lengths)
    assert result.metrics["critic/advantages/mean"] == pytest.approx(mean)
    assert result.metrics["critic/returns_mean"] == pytest.approx(mean)


def test_a_broken_critic_skips_the_step_of_both(start):
    engine = start(algorithm={"advantage": "gae"})
    train(engine, 1)
    healthy = {name: tensor.clone() for name, tensor in engine.gather_state().items()}
    broken = healthy | {"master/critic.body.norm.weight": torch.full((64,), float("nan"))}
    engine.restore(engine.scalars(), read=broken.__getitem__)
    before = weights(engine)
    result = engine.train_batch(make_batch(micro_batches=SPLIT, batch_id=2, policy_version=1))
    assert (result.num_applied, result.num_skipped, result.policy_version) == (0, 1, 1)
    assert result.metrics["critic/skipped_steps"] == 1.0
    assert all(torch.equal(t, before[name]) for name, t in weights(engine).items())


def test_critic_and_controllers_are_part_of_the_checkpoint(start):
    sections = {
        "algorithm": {
            "advantage": "gae",
            "kl": {"where": "loss", "controller": "adaptive", "coef": 0.1, "horizon": 50},
            "entropy": {"controller": "adaptive", "target": 9.0, "coef": 0.001, "delta": 0.0005},
        }
    }
    straight = start(**sections)
    train(straight)
    state = save_state(straight, attempt=1)
    saved = {name: tensor.clone() for name, tensor in state.tensors.items()}
    scalars = straight.scalars()
    assert scalars["kl_controller"]["value"] != 0.1 and scalars["entropy_controller"]["coef"] == 0.002
    later = make_batch(micro_batches=SPLIT, batch_id=3, policy_version=2, seed=2)
    expected = straight.train_batch(later).metrics

    resumed = start(**sections)
    resumed.restore(scalars, read=saved.__getitem__)
    found = resumed.train_batch(later).metrics
    timing = {name for name in expected if name.startswith("perf/") or name == "learner/resident_mb"}
    assert {n: v for n, v in found.items() if n not in timing} == {n: v for n, v in expected.items() if n not in timing}


def test_a_checkpoint_without_a_critic_is_not_taken_for_one_with(start, tmp_path):
    from learner.checkpoint.store import newest_committed, write_checkpoint
    from protocol.errors import UserError

    plain = start()
    train(plain, 1)
    write_checkpoint(tmp_path / "checkpoints", save_state(plain, attempt=1), keep=1)
    with pytest.raises(UserError, match=r"critic\.body.* is None there"):
        load_checkpoint(start(algorithm={"advantage": "gae"}), newest_committed(tmp_path / "checkpoints"))


def test_remax_is_refused_for_want_of_greedy_answers(start):
    with pytest.raises(ValueError, match="remax"):
        start(algorithm={"advantage": "remax"})
