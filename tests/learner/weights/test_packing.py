"""Buckets cover every tensor once, and packing followed by unpacking is the identity."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.weights.buckets import bucket_layout, check_buckets, pack, plan_buckets, unpack
from learner.weights.snapshot import Snapshot

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=12))
    tensors = [(f"layer.{i}", torch.randn(shape).to(draw(st.sampled_from(DTYPES)))) for i, shape in enumerate(shapes)]
    return Snapshot(policy_version=1, tensors=tensors)


@settings(max_examples=60, deadline=None)
@given(snapshot=snapshots(), bucket_bytes=st.integers(1, 4096))
def test_pack_then_unpack_is_the_identity(snapshot: Snapshot, bucket_bytes: int) -> None:
    specs = snapshot.specs()
    buckets = plan_buckets(specs, bucket_bytes=bucket_bytes)
    check_buckets(specs, buckets)
    received: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        layout = bucket_layout(specs, bucket)
        assert layout.num_bytes <= bucket_bytes or len(bucket) == 1
        wire = pack(layout, snapshot.tensors, torch.empty(layout.num_bytes, dtype=torch.uint8)).clone()
        received.update(unpack(layout, specs, wire))
    assert list(received) == [name for name, _ in snapshot.tensors]
    for name, tensor in snapshot.tensors:
        assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor)


def test_buckets_that_miss_or_repeat_a_tensor_are_refused() -> None:
    specs = Snapshot(policy_version=1, tensors=[("a", torch.zeros(2)), ("b", torch.zeros(2))]).specs()
    for bad in ([[0]], [[0, 1], [1]], [[0], [2]]):
        with pytest.raises(ValueError, match="cover"):
            check_buckets(specs, bad)


def test_snapshot_refuses_what_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="twice: a"):
        Snapshot(policy_version=1, tensors=[("a", torch.zeros(2)), ("a", torch.zeros(2))]).specs()
    with pytest.raises(ValueError, match="not contiguous"):
        Snapshot(policy_version=1, tensors=[("a", torch.zeros(2, 3).T)]).specs()
