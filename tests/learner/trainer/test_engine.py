"""The engine against the naive reference learner, on one rank in this process."""

import numpy as np
import pytest
import torch

from learner.trainer.batch import TrajectoryArrays
from tests.learner.trainer.reference import ReferenceLearner
from tests.support.training import make_arrays, make_batch, make_items

pytestmark = pytest.mark.engine

ONE_SPLIT = [[[0, 1, 2, 3, 4], [5, 6, 7]]]


def weights(engine):
    return dict(engine.gather_snapshot().tensors)


def assert_same(actual, expected, *, tolerance):
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        difference = (tensor.double() - expected[name].double()).abs()
        assert torch.equal(tensor, expected[name]) or float(difference.max()) <= tolerance, name


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_updates_equal_the_reference_learner(start, num_mini_batches, entropy_coef):
    engine = start(
        learner={"mini_batches": num_mini_batches, "optim": {"weight_decay": 0.1}},
        algorithm={"entropy": {"coef": entropy_coef}},
    )
    reference = ReferenceLearner(engine.config)
    for step in range(3):
        batch = make_batch(micro_batches=ONE_SPLIT, batch_id=step + 1, policy_version=step, seed=step)
        result = engine.train_batch(batch)
        losses = reference.train_batch(batch, num_mini_batches=num_mini_batches)
        assert result.metrics["actor/loss"] == pytest.approx(sum(losses) / num_mini_batches, abs=2e-5)
        assert (result.num_applied, result.num_skipped) == (num_mini_batches, 0)
        assert result.policy_version == engine.policy_version == step + 1
    assert_same(weights(engine), reference.weights(), tolerance=2e-5)


def test_b04_loss_and_weights_do_not_depend_on_the_split(start):
    splits = [ONE_SPLIT, [[[i] for i in range(8)]], [[[7, 0, 3], [], [1, 2], [4, 5, 6]]]]
    trained = []
    for split in splits:
        engine = start()
        result = engine.train_batch(make_batch(micro_batches=split))
        trained.append((result.metrics["actor/loss"], weights(engine)))
    for loss, tensors in trained[1:]:
        assert loss == pytest.approx(trained[0][0], abs=1e-6)
        assert_same(tensors, trained[0][1], tolerance=1e-5)


def test_gradient_checkpointing_and_chunk_size_change_nothing(start):
    plain, recomputing = start(), start(model={"gradient_checkpointing": True}, learner={"logprob_chunk_tokens": 5})
    for engine in (plain, recomputing):
        engine.train_batch(make_batch(micro_batches=ONE_SPLIT))
    assert_same(weights(recomputing), weights(plain), tolerance=1e-5)


def test_b01_skipped_updates_move_neither_version_nor_weights(start):
    engine = start(learner={"optim": {"warmup_updates": 4}})
    engine.train_batch(make_batch(micro_batches=ONE_SPLIT))
    healthy = engine.gather_state()
    broken = healthy | {"master/model.norm.weight": torch.full((64,), float("inf"))}  # infinite logits
    engine.restore(engine.scalars(), read=broken.__getitem__)
    before = weights(engine)
    for count in (1, 2):
        result = engine.train_batch(make_batch(micro_batches=ONE_SPLIT, batch_id=1 + count))
        assert (result.num_applied, result.num_skipped, result.num_skipped_in_a_row) == (0, 1, count)
        assert (result.policy_version, engine.last_batch_id) == (1, 1 + count)
        assert all(np.isfinite(value) for value in result.metrics.values())
    assert_same(weights(engine), before, tolerance=0.0)
    engine.restore(engine.scalars(), read=healthy.__getitem__)
    result = engine.train_batch(make_batch(micro_batches=ONE_SPLIT, batch_id=4))
    assert (result.num_applied, result.num_skipped_in_a_row, result.policy_version) == (1, 0, 2)
    assert result.metrics["actor/lr"] == pytest.approx(2 / 4 * 1e-3)  # the second update of the warm-up, not the fourth


def test_stale_tokens_leave_numerator_and_denominator_and_are_counted(start):
    items = make_items()
    arrays = make_arrays(items)
    reference_arrays = {}
    for index, own in arrays.items():
        versions, mask = own.versions.copy(), own.loss_mask.copy()
        versions[::3] = -2  # older than 0 - max_staleness
        mask[::3] = 0
        arrays[index] = TrajectoryArrays(own.token_ids, own.logp_behaviour, versions, own.loss_mask)
        reference_arrays[index] = TrajectoryArrays(own.token_ids, own.logp_behaviour, versions, mask)
    engine = start(algorithm={"max_staleness": 1})
    reference = ReferenceLearner(engine.config)
    result = engine.train_batch(make_batch(micro_batches=ONE_SPLIT, items=items, arrays=arrays))
    reference.train_batch(make_batch(micro_batches=ONE_SPLIT, items=items, arrays=reference_arrays))
    assert result.num_stale_tokens == sum(len(a.versions[::3]) for a in arrays.values())
    assert result.num_trained_tokens == sum(int(a.loss_mask.sum()) for a in reference_arrays.values())
    assert result.max_token_staleness == 2
    assert result.trained_ages == {0: result.num_trained_tokens}
    assert_same(weights(engine), reference.weights(), tolerance=2e-5)


def test_b10_masks_come_from_recorded_lengths_not_from_token_ids(start):
    items = make_items()
    arrays = make_arrays(items)
    for index, own in arrays.items():
        tokens = own.token_ids.copy()
        tokens[-1] = 258  # end of sequence, sampled
        tokens[-2:-1] = 256  # the pad id, sampled in the middle
        arrays[index] = TrajectoryArrays(tokens, own.logp_behaviour, own.versions, own.loss_mask)
    engine = start()
    result = engine.train_batch(make_batch(micro_batches=ONE_SPLIT, items=items, arrays=arrays))
    assert result.num_trained_tokens == sum(item.num_response_tokens for item in items)


def test_b11_a_missing_behaviour_logprob_is_an_error_that_names_the_trajectory(start):
    items = make_items()
    arrays = make_arrays(items)
    arrays[3].logp_behaviour[0] = np.nan
    engine = start()
    before = weights(engine)
    with pytest.raises(ValueError, match=r"1/1 \(p1\).*behaviour log-prob"):
        engine.train_batch(make_batch(micro_batches=ONE_SPLIT, items=items, arrays=arrays))
    assert engine.policy_version == 0
    assert_same(weights(engine), before, tolerance=0.0)


def test_b11_an_asynchronous_run_without_correction_is_refused(start):
    with pytest.raises(ValueError, match="without correction"):
        start(algorithm={"max_staleness": 1, "behaviour": {"level": "off"}})


def test_b06_snapshot_has_the_models_names_shapes_and_type_and_tied_heads_once(start):
    from transformers import AutoModelForCausalLM

    engine = start(model={"dtype": "bfloat16"})
    snapshot = engine.gather_snapshot()
    model = AutoModelForCausalLM.from_pretrained(engine.config.model.path, dtype=torch.bfloat16)
    assert_same(dict(snapshot.tensors), dict(model.named_parameters()), tolerance=0.0)
    assert all(t.is_contiguous() and t.dtype is torch.bfloat16 for _, t in snapshot.tensors)
    assert "lm_head.weight" not in dict(snapshot.tensors)


def test_b06_a_tensor_of_the_wrong_shape_is_not_exported(start):
    engine = start()
    engine.zero.shapes["hf.model.norm.weight"] = torch.Size([32])
    with pytest.raises(ValueError, match=r"hf\.model\.norm\.weight.*not exported"):
        engine.gather_snapshot()


def test_reference_kl_in_loss_pulls_towards_the_initial_policy(start):
    distances = []
    for coef in (0.0, 10.0):
        engine = start(algorithm={"kl": {"where": "loss", "coef": coef}})
        before = weights(engine)
        for step in range(3):
            batch = make_batch(micro_batches=ONE_SPLIT, batch_id=step + 1, policy_version=step)
            result = engine.train_batch(batch)
        distances.append(sum(float((t - before[n]).norm()) for n, t in weights(engine).items()))
        assert result.metrics["actor/kl_ref"] > 0
    assert distances[1] < distances[0]


def test_bfloat16_follows_the_reference_within_its_precision(start):
    engine = start(model={"dtype": "bfloat16"})
    reference = ReferenceLearner(engine.config)
    batch = make_batch(micro_batches=ONE_SPLIT)
    result = engine.train_batch(batch)
    assert result.metrics["actor/loss"] == pytest.approx(reference.train_batch(batch)[0], abs=0.05)
