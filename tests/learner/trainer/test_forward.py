"""Packed forward and backward passes equal those of one sequence at a time; log-prob chunks equal whole logits."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.trainer.attention import SHORT_DOCUMENT, packed_attention, plan_layout
from learner.trainer.batch import build_micro_batch, split_mini_batches
from learner.trainer.forward import load_policy
from learner.trainer.logprob import LogProbHead
from tests.support.tiny_model import build_tiny_model
from tests.support.training import make_arrays, make_batch, make_items

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = build_tiny_model(tmp_path_factory.mktemp("model"))
    return load_policy(path, dtype=torch.float32, kernel="sdpa", chunk_tokens=7, gradient_checkpointing=False)


def gradients(policy, micro_batches):
    """Log-probs and entropies of the items in order, and the gradient of a weighted sum of both."""
    policy.zero_grad()
    logp, entropy = {}, {}
    for micro_batch in micro_batches:
        logp_T, entropy_T = policy(micro_batch)
        (logp_T.square().sum() + 3 * entropy_T.sum()).backward()
        for sequence, index in enumerate(micro_batch.indices):
            logp[index] = logp_T[micro_batch.seq_id_T == sequence].detach()
            entropy[index] = entropy_T[micro_batch.seq_id_T == sequence].detach()
    flat = torch.cat([p.grad.flatten() for p in policy.parameters()])
    return (*(torch.cat([values[i] for i in sorted(values)]) for values in (logp, entropy)), flat)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), group_size=st.integers(1, 4), shuffle=st.randoms(use_true_random=False))
def test_packed_equals_one_sequence_at_a_time(policy, seed, group_size, shuffle):
    items = make_items(num_groups=3, group_size=group_size, seed=seed)
    arrays = make_arrays(items, seed=seed)
    order = list(range(len(items)))
    shuffle.shuffle(order)

    def build(indices):
        return build_micro_batch(indices, items=items, arrays=arrays, kernel="sdpa", device=CPU)

    packed = build(order)
    if group_size > 1:
        num_tokens = sum(len(a.token_ids) for a in arrays.values())
        assert packed.num_tokens == num_tokens - (group_size - 1) * sum(
            item.num_prompt_tokens for item in items if item.slot == 0
        ), "a prompt is held once per group"
    for one, other in zip(gradients(policy, [packed]), gradients(policy, [build([i]) for i in order]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [[3, 300, 290, 1], [SHORT_DOCUMENT, SHORT_DOCUMENT + 1, 2, 2]])
def test_attention_equals_a_dense_block_mask(lengths):
    generator = torch.Generator().manual_seed(0)
    num_tokens, starts = sum(lengths), np.concatenate([[0], np.cumsum(lengths)])
    query, key, value = (torch.randn(1, heads, num_tokens, 8, generator=generator) for heads in (4, 2, 2))
    documents = [np.arange(a, b) for a, b in pairwise(starts)]
    layout = plan_layout(documents, kernel="sdpa", device=CPU)
    inputs = [t.clone().requires_grad_() for t in (query, key, value)]
    packed, _ = packed_attention(torch.nn.Identity(), *inputs, None, packed_layout=layout)
    document_N = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    mask = (document_N[:, None] == document_N[None, :]).tril()
    plain = [t.clone().requires_grad_() for t in (query, key, value)]
    dense = torch.nn.functional.scaled_dot_product_attention(*plain, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(packed, dense, rtol=1e-5, atol=1e-5)
    weight = torch.randn(dense.shape, generator=generator)
    (packed * weight).sum().backward()
    (dense * weight).sum().backward()
    for one, other in zip(inputs, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 64])
def test_logprob_head_equals_whole_logits_in_value_and_gradient(chunk_tokens):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(13, 6, generator=generator, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(11, 6, generator=generator))
    token, temperature = torch.randint(0, 11, (13,), generator=generator), torch.linspace(0.5, 1.5, 13)
    logp, entropy = LogProbHead(weight, chunk_tokens=chunk_tokens)(hidden, token, temperature)
    logq = torch.log_softmax((hidden @ weight.T).double() / temperature[:, None], dim=-1)
    expected = logq.gather(1, token[:, None])[:, 0], -(logq.exp() * logq).sum(-1)
    torch.testing.assert_close(logp, expected[0].float())
    torch.testing.assert_close(entropy, expected[1].float())
    factor = torch.randn(2, 13, generator=generator)
    found, wanted = (
        torch.autograd.grad((outputs[0] * factor[0] + outputs[1] * factor[1]).sum(), (hidden, weight))
        for outputs in ((logp, entropy), expected)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_mini_batches_hold_whole_groups_and_equal_counts_on_all_ranks():
    plan = make_batch(micro_batches=[[[0, 1, 2], [6]], [[3, 4, 5], [7]]]).plan
    minis = split_mini_batches(plan, num_mini_batches=2)
    assert minis == [[[[0, 1, 2]], [[3]]], [[[], [6]], [[4, 5], [7]]]]


@pytest.mark.parametrize(
    ("split", "num_mini_batches", "message"),
    [
        ([[[0, 1, 2, 3]], [[4, 5, 6], [7]]], 1, "different numbers"),
        ([[[0, 1, 2, 3, 4, 5, 6]]], 1, "each of its 8 items once"),
        ([[[0, 1, 2, 3, 4, 5, 6, 7]]], 3, "do not divide"),
    ],
)
def test_b05_a_plan_that_would_leave_a_rank_waiting_is_refused(split, num_mini_batches, message):
    with pytest.raises(ValueError, match=message):
        split_mini_batches(make_batch(micro_batches=split).plan, num_mini_batches=num_mini_batches)
