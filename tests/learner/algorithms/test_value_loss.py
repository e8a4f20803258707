from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.algorithms.metrics import add_metric_sums, finalize_metrics
from learner.algorithms.value_loss import compute_value_loss
from tests.learner.algorithms import naive


@dataclass(frozen=True)
class Critic:
    value_T: Tensor
    old_value_T: Tensor
    return_T: Tensor
    mask_T: Tensor
    seq_id_T: Tensor


def make(seed: int, *, num: int = 40) -> Critic:
    rng = np.random.default_rng(seed)
    return Critic(
        *(torch.tensor(rng.standard_normal(num)) for _ in range(3)),
        mask_T=torch.tensor(rng.random(num) < 0.7),
        seq_id_T=torch.arange(num) // 5,
    )


def run(batch: Critic, *, num_tokens: int):
    value_T = batch.value_T.clone().requires_grad_(True)
    loss, sums = compute_value_loss(**{**vars(batch), "value_T": value_T}, clip=0.3, num_tokens_global=num_tokens)
    loss.backward()
    return loss.detach(), value_T.grad, sums


@pytest.mark.parametrize("seed", range(10))
def test_value_loss_matches_the_naive_reference(seed: int) -> None:
    batch = make(seed)
    loss, _, sums = run(batch, num_tokens=17)
    b = {name: x.numpy() for name, x in vars(batch).items()}
    expected = naive.value_loss(b["value_T"], b["old_value_T"], b["return_T"], b["mask_T"], 0.3, 17)
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    metrics = finalize_metrics(sums)
    num_trained = int(batch.mask_T.sum())
    assert metrics["critic/vf_loss"] == pytest.approx(expected * 17 / num_trained)
    target, value = b["return_T"][b["mask_T"]], b["value_T"][b["mask_T"]]
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - (target - value).var() / target.var())
    assert metrics["critic/vpred_mean"] == pytest.approx(value.mean())
    assert 0 < metrics["critic/vf_clipfrac"] < 1


def test_b03_masked_values_influence_nothing() -> None:
    batch = make(0)
    clean = run(batch, num_tokens=17)
    spoiled = {
        n: torch.where(batch.mask_T, getattr(batch, n), torch.tensor(float("nan")).double())
        for n in ("value_T", "old_value_T", "return_T")
    }
    dirty = run(replace(batch, **spoiled), num_tokens=17)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert finalize_metrics(clean[2]) == finalize_metrics(dirty[2])
    with pytest.raises(ValueError, match="value is nan at token"):
        run(replace(batch, value_T=torch.full((40,), float("nan"))), num_tokens=17)


def test_b04_split_gives_the_same_loss_and_explained_variance() -> None:
    batch = make(1)
    whole = run(batch, num_tokens=17)
    parts = [
        run(Critic(*(x[rows] for x in vars(batch).values())), num_tokens=17) for rows in (slice(0, 15), slice(15, 40))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    torch.testing.assert_close(torch.cat([parts[0][1], parts[1][1]]), whole[1])
    joined = add_metric_sums(parts[0][2], parts[1][2])
    assert finalize_metrics(joined) == pytest.approx(finalize_metrics(whole[2]))


def test_explained_variance_is_absent_when_returns_do_not_vary() -> None:
    batch = replace(make(1), return_T=torch.ones(40).double())
    assert "critic/vf_explained_var" not in finalize_metrics(run(batch, num_tokens=17)[2])


def test_an_empty_update_is_refused() -> None:
    with pytest.raises(ValueError, match="skip the critic's update"):
        run(make(1), num_tokens=0)
