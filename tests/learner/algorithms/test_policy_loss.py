import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.aggregate import AGGREGATIONS
from learner.algorithms.importance import BehaviourConfig
from learner.algorithms.losses import POLICY_LOSSES, ClipRange
from learner.algorithms.metrics import add_metric_sums, finalize_metrics
from learner.algorithms.policy_loss import LossConfig, compute_policy_loss, zero_loss
from learner.algorithms.tensors import count_trained
from tests.learner.algorithms import naive
from tests.learner.algorithms.batches import Batch, loss_and_grad, make_batch

BEHAVIOURS = [
    BehaviourConfig(level=level, mode=mode, low=0.5, high=1.6)
    for level, mode in itertools.product(("token", "sequence", "geometric", "off"), ("truncate", "mask"))
]


def config_of(loss: str, aggregation: str = "token_mean", **changes: object) -> LossConfig:
    return LossConfig(loss=loss, aggregation=aggregation, sum_constant=11.0, **changes)  # type: ignore[arg-type]


def naive_loss(batch: Batch, config: LossConfig) -> float:
    b = batch.numpy()
    per_token = naive.token_losses(
        config.loss,
        b["logp"],
        b["logp_prox"],
        b["logp_behaviour"],
        b["adv"],
        b["mask"],
        b["seq_id"],
        config.clip.low,
        config.clip.high,
        config.clip.dual,
    )
    numerator = POLICY_LOSSES[config.loss].weight_numerator
    if numerator:
        per_token = per_token * naive.weights(
            b["logp"] if numerator == "current" else b["logp_prox"],
            b["logp_behaviour"],
            b["mask"],
            b["seq_id"],
            config.behaviour.level,
            config.behaviour.mode,
            config.behaviour.low,
            config.behaviour.high,
        )
    kl = [naive.kl(x, y, config.kl_estimator) for x, y in zip(b["logp"], b["ref_logp"], strict=True)]
    entropy = b["entropy"] + 0.1 * b["logp"]
    total = per_token - config.entropy_coef * entropy + config.kl_coef * np.asarray(kl)
    num_tokens = int(b["mask"].sum())
    num_seqs = len(set(b["seq_id"][b["mask"]].tolist()))
    return naive.aggregate(config.aggregation, total, b["mask"], b["seq_id"], num_tokens, num_seqs, config.sum_constant)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), behaviour=st.sampled_from(BEHAVIOURS), dual=st.sampled_from([0.0, 1.2, 3.0]))
def test_loss_matches_the_naive_reference(
    loss: str, aggregation: str, seed: int, behaviour: BehaviourConfig, dual: float
) -> None:
    batch = make_batch(seed)
    config = config_of(
        loss,
        aggregation,
        behaviour=behaviour,
        clip=ClipRange(low=0.2, high=0.28, dual=dual),
        entropy_coef=0.01,
        kl_coef=0.05,
    )
    actual, _, _ = loss_and_grad(batch, config)
    np.testing.assert_allclose(float(actual), naive_loss(batch, config), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", ["decoupled_ppo", "ppo_clip", "gspo"])
def test_gradient_matches_finite_differences_of_the_naive_loss(loss: str) -> None:
    batch = make_batch(3, scale=0.1)
    config = config_of(loss, "seq_mean_token_mean", clip=ClipRange(low=0.2, high=0.2, dual=3.0))
    _, grad_T, _ = loss_and_grad(batch, config)
    for t in range(len(grad_T)):
        step = torch.zeros_like(batch.logp_T)
        step[t] = 1e-6
        up = naive_loss(replace(batch, logp_T=batch.logp_T + step), config)
        down = naive_loss(replace(batch, logp_T=batch.logp_T - step), config)
        assert float(grad_T[t]) == pytest.approx((up - down) / 2e-6, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b02_finite_for_gaps_of_a_thousand_nats_and_both_signs(loss: str, dtype: torch.dtype, estimator: str) -> None:
    gaps = list(itertools.product((-1000.0, -1.0, 0.0, 1000.0), repeat=2))
    for behaviour, sign in itertools.product(BEHAVIOURS, (1.0, -1.0)):
        num = len(gaps)
        logp_T = torch.full((num,), -3.0, dtype=dtype)
        batch = Batch(
            logp_T=logp_T,
            logp_prox_T=torch.tensor([-3.0 - a for a, _ in gaps], dtype=dtype),
            logp_behaviour_T=torch.tensor([-3.0 - b for _, b in gaps], dtype=dtype),
            adv_T=torch.full((num,), sign),
            mask_T=torch.ones(num, dtype=torch.bool),
            seq_id_T=torch.arange(num) // 2,
            entropy_T=torch.ones(num, dtype=dtype),
            ref_logp_T=torch.tensor([-3.0 - b for _, b in gaps], dtype=dtype),
        )
        config = config_of(
            loss,
            behaviour=behaviour,
            clip=ClipRange(dual=0.0),
            kl_coef=0.1,
            kl_estimator=estimator,
            kl_straight_through=sign > 0,
        )
        value, grad_T, sums = loss_and_grad(batch, config)
        assert torch.isfinite(value)
        assert torch.isfinite(grad_T).all()
        metrics = finalize_metrics(sums)
        assert all(np.isfinite(x) for x in metrics.values())
        assert metrics["actor/bounded_share"] == sum(max(map(abs, gap)) == 1000 for gap in gaps) / num


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_b03_masked_positions_influence_nothing(loss: str, aggregation: str, poison: float) -> None:
    batch = make_batch(5)
    config = config_of(loss, aggregation, entropy_coef=0.01, kl_coef=0.1, behaviour=BehaviourConfig("sequence"))
    clean = loss_and_grad(batch, config)
    names = ("logp_T", "logp_prox_T", "logp_behaviour_T", "adv_T", "entropy_T", "ref_logp_T")
    spoiled = {n: torch.where(batch.mask_T, getattr(batch, n), torch.tensor(poison).double()) for n in names}
    dirty = loss_and_grad(replace(batch, **spoiled), config)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert (dirty[1][~batch.mask_T] == 0).all()
    assert finalize_metrics(clean[2]) == finalize_metrics(dirty[2])


@pytest.mark.parametrize("name", ["logp_T", "logp_prox_T", "logp_behaviour_T", "adv_T", "entropy_T", "ref_logp_T"])
def test_b03_unmasked_non_finite_value_names_the_trajectory(name: str) -> None:
    batch = make_batch(5)
    position = int(torch.nonzero((batch.seq_id_T == 2) & batch.mask_T)[0])
    spoiled = getattr(batch, name).clone()
    spoiled[position] = float("nan")
    offset = position - int(torch.nonzero(batch.seq_id_T == 2)[0])
    with pytest.raises(ValueError, match=f"is nan at token {offset} of trajectory g7/2"):
        compute_policy_loss(
            **{**vars(batch), name: spoiled},
            config=LossConfig(),
            num_tokens_global=9,
            num_seqs_global=5,
            trajectory_ids=[f"g7/{i}" for i in range(5)],
        )


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), order=st.permutations(range(6)), cuts=st.lists(st.integers(0, 6), max_size=3))
def test_b04_any_split_over_micro_batches_and_ranks_gives_the_same_loss_and_gradient(
    loss: str, aggregation: str, seed: int, order: list[int], cuts: list[int]
) -> None:
    batch = make_batch(seed, num_seqs=6)
    config = config_of(
        loss, aggregation, entropy_coef=0.01, kl_coef=0.1, behaviour=BehaviourConfig("geometric", "mask", 1.5, 0.6)
    )
    counts = count_trained(batch.mask_T, batch.seq_id_T)
    whole_loss, whole_grad_T, whole_sums = loss_and_grad(batch, config)
    edges = [0, *sorted(cuts), 6]
    total, grad_T, sums = torch.zeros(()).double(), torch.zeros_like(whole_grad_T), {}
    for start, end in itertools.pairwise(edges):  # an empty part is a dummy micro-batch
        sequences = order[start:end]
        part_loss, part_grad_T, part_sums = loss_and_grad(batch.select(sequences), config, counts=counts)
        total += part_loss
        rows = [torch.nonzero(batch.seq_id_T == s).flatten() for s in sequences]
        if rows:
            grad_T[torch.cat(rows)] += part_grad_T
        sums = add_metric_sums(sums, part_sums)
    torch.testing.assert_close(total, whole_loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad_T, whole_grad_T, rtol=1e-12, atol=1e-12)
    assert finalize_metrics(sums) == pytest.approx(finalize_metrics(whole_sums), rel=1e-9, abs=1e-12)


def test_b10_exactly_the_masked_tokens_are_trained_whatever_their_ids() -> None:
    batch = make_batch(2)
    _, grad_T, sums = loss_and_grad(batch, config_of("reinforce"))
    assert torch.equal(grad_T != 0, batch.mask_T)
    assert finalize_metrics(sums)["learner/trained_tokens"] == int(batch.mask_T.sum())


def test_b11_missing_behaviour_log_probs_are_an_error() -> None:
    batch = make_batch(2)
    with pytest.raises(ValueError, match="behaviour log-probs are missing"):
        compute_policy_loss(
            **{**vars(batch), "logp_behaviour_T": None}, config=LossConfig(), num_tokens_global=9, num_seqs_global=5
        )


def test_b11_stale_data_without_a_correction_is_refused() -> None:
    off = BehaviourConfig(level="off")
    for loss in ("decoupled_ppo", "gspo", "reinforce"):
        with pytest.raises(ValueError, match="trains stale tokens without correction"):
            LossConfig(loss=loss, behaviour=off).require_correction(max_staleness=1)
        LossConfig(loss=loss, behaviour=off).require_correction(max_staleness=0)
        LossConfig(loss=loss).require_correction(max_staleness=8)
    LossConfig(loss="ppo_clip", behaviour=off).require_correction(max_staleness=1)


def test_b11_loss_depends_on_the_recorded_behaviour() -> None:
    batch = make_batch(2)
    shifted = replace(batch, logp_behaviour_T=batch.logp_behaviour_T + 0.3)
    for loss in sorted(POLICY_LOSSES):
        config = config_of(loss, clip=ClipRange(low=0.9, high=9.0, dual=0.0), behaviour=BehaviourConfig(high=9.0))
        assert not torch.allclose(loss_and_grad(batch, config)[1], loss_and_grad(shifted, config)[1])


def test_b66_ratio_is_one_when_nothing_happened_since_sampling() -> None:
    batch = make_batch(1)
    fresh = replace(batch, logp_prox_T=batch.logp_T, logp_behaviour_T=batch.logp_T)
    metrics = finalize_metrics(loss_and_grad(fresh, LossConfig())[2])
    assert metrics["actor/ratio_mean"] == metrics["importance/rho_mean"] == metrics["importance/ess"] == 1.0
    assert metrics["actor/ratio_share/lt_1.01"] == 1.0
    assert metrics["actor/ppo_kl"] == metrics["actor/kl_behaviour"] == 0.0


def test_fresh_data_makes_decoupled_ppo_plain_ppo() -> None:
    batch = make_batch(1)
    fresh = replace(batch, logp_behaviour_T=batch.logp_prox_T)
    decoupled = loss_and_grad(fresh, LossConfig(loss="decoupled_ppo"))
    plain = loss_and_grad(fresh, LossConfig(loss="ppo_clip"))
    assert torch.equal(decoupled[0], plain[0])
    assert torch.equal(decoupled[1], plain[1])


def test_rejected_tokens_leave_the_numerator_only() -> None:
    batch = make_batch(4, scale=0.0)
    first = int(torch.nonzero(batch.mask_T)[0])
    behaviour_T = batch.logp_behaviour_T.clone()
    behaviour_T[first] -= 5.0  # rho = e^5
    config = LossConfig(behaviour=BehaviourConfig(mode="mask", low=0.5, high=2.0))
    _, clean_T, _ = loss_and_grad(batch, config)
    _, grad_T, sums = loss_and_grad(replace(batch, logp_behaviour_T=behaviour_T), config)
    expected_T = clean_T.clone()
    expected_T[first] = 0.0
    torch.testing.assert_close(grad_T, expected_T)
    assert finalize_metrics(sums)["importance/capped_share"] == pytest.approx(1 / int(batch.mask_T.sum()))


def test_b67_capped_share_is_reported_by_length() -> None:
    num = 600 + 10
    behaviour_T = torch.zeros(num)
    behaviour_T[600:605] = -3.0
    seq_id_T = torch.cat([torch.zeros(600), torch.ones(10)]).long()
    ones = torch.ones(num, dtype=torch.bool)
    zeros = torch.zeros(num)
    batch = Batch(zeros, zeros, behaviour_T, zeros, ones, seq_id_T, zeros, zeros)
    metrics = finalize_metrics(loss_and_grad(batch, LossConfig())[2])
    assert metrics["importance/capped_share/le_512"] == 0.5
    assert metrics["importance/capped_share/le_2048"] == 0.0
    assert "importance/capped_share/gt_32768" not in metrics


def test_sum_keys_do_not_depend_on_the_data() -> None:
    batch = make_batch(0)
    full = loss_and_grad(batch, LossConfig())[2]
    empty = loss_and_grad(batch.select([]), LossConfig(), counts=(3, 1))[2]
    assert list(full) == list(empty)
    assert all(float(x) == 0 for x in empty.values())


def test_losses_stay_means_over_several_mini_batches() -> None:
    first, second = (loss_and_grad(make_batch(seed), LossConfig()) for seed in (0, 1))
    metrics = finalize_metrics(add_metric_sums(first[2], second[2]))
    assert metrics["actor/pg_loss"] == pytest.approx(float(first[0] + second[0]) / 2)
    assert finalize_metrics(first[2])["actor/loss"] == pytest.approx(float(first[0]))


def test_zero_loss_is_connected_and_without_influence() -> None:
    x_T = torch.tensor([float("nan"), 1.0], requires_grad=True)
    loss = zero_loss(x_T)
    loss.backward()
    assert float(loss.detach()) == 0
    assert x_T.grad is not None and (x_T.grad == 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LossConfig(loss="ppo"), "unknown policy loss 'ppo'"),
        (lambda: LossConfig(aggregation="mean"), "unknown aggregation 'mean'"),
        (lambda: LossConfig(aggregation="seq_sum_over_constant"), "needs sum_constant"),
        (lambda: ClipRange(low=1.5), "clip_low must be in"),
        (lambda: ClipRange(dual=0.5), "clip_dual must be above 1"),
        (lambda: BehaviourConfig(low=3.0), "0 <= low < high"),
        (lambda: BehaviourConfig(level="none"), "behaviour.level must be"),  # type: ignore[arg-type]
        (lambda: BehaviourConfig(mode="clip"), "behaviour.mode must be"),  # type: ignore[arg-type]
    ],
)
def test_configuration_is_checked(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_inputs_are_checked() -> None:
    batch = make_batch(0)
    counts = {"num_tokens_global": 5, "num_seqs_global": 2}
    with pytest.raises(ValueError, match="skip the update"):
        compute_policy_loss(**vars(batch), config=LossConfig(), num_tokens_global=0, num_seqs_global=0)
    with pytest.raises(ValueError, match="no reference log-probs"):
        compute_policy_loss(**{**vars(batch), "ref_logp_T": None}, config=LossConfig(kl_coef=0.1), **counts)
    with pytest.raises(ValueError, match="entropy was not computed"):
        compute_policy_loss(**{**vars(batch), "entropy_T": None}, config=LossConfig(entropy_coef=0.1), **counts)
