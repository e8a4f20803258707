"""Packing of a version's tensors into a few large byte buffers, the same way at both ends.

A bucket is a list of consecutive indices into the offered tensors; each tensor starts at a multiple of `ALIGNMENT`
bytes. Both ends compute the layout from the offer alone; per-tensor checksums prove that they agreed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from learner.weights.snapshot import parse_dtype
from protocol.messages import TensorSpec

ALIGNMENT = 256


def spec_num_bytes(spec: TensorSpec) -> int:
    """Bytes of one tensor."""
    return prod(spec.shape) * parse_dtype(spec.dtype).itemsize


def plan_buckets(specs: Sequence[TensorSpec], *, bucket_bytes: int) -> list[list[int]]:
    """Fills buckets in order up to `bucket_bytes`; a larger tensor gets a bucket of its own."""
    buckets: list[list[int]] = []
    used = bucket_bytes + 1
    for index, spec in enumerate(specs):
        size = _aligned(spec_num_bytes(spec))
        if used + size > bucket_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(index)
        used += size
    return buckets


@dataclass(frozen=True)
class BucketLayout:
    """Byte offset of each tensor of a bucket, and the bucket's size."""

    indices: list[int]
    offsets: list[int]
    num_bytes: int


def bucket_layout(specs: Sequence[TensorSpec], bucket: list[int]) -> BucketLayout:
    """Where each tensor of `bucket` lies."""
    offsets: list[int] = []
    end = 0
    for index in bucket:
        offsets.append(end)
        end += _aligned(spec_num_bytes(specs[index]))
    return BucketLayout(indices=bucket, offsets=offsets, num_bytes=end)


def check_buckets(specs: Sequence[TensorSpec], buckets: list[list[int]]) -> None:
    """Every tensor is in exactly one bucket.

    Raises:
        ValueError: otherwise.
    """
    flat = [index for bucket in buckets for index in bucket]
    if sorted(flat) != list(range(len(specs))):
        raise ValueError(f"{len(flat)} bucket entries do not cover the {len(specs)} offered tensors once each")


def pack(layout: BucketLayout, tensors: Sequence[tuple[str, torch.Tensor]], out: torch.Tensor) -> torch.Tensor:
    """Copies a bucket's tensors into `out` (uint8, at least `layout.num_bytes`); returns the used part."""
    for index, offset in zip(layout.indices, layout.offsets, strict=True):
        flat = tensors[index][1].detach().reshape(-1).view(torch.uint8)
        out[offset : offset + flat.numel()].copy_(flat, non_blocking=True)
    return out[: layout.num_bytes]


def unpack(layout: BucketLayout, specs: Sequence[TensorSpec], buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Views of a bucket's tensors (no copy)."""
    tensors = []
    for index, offset in zip(layout.indices, layout.offsets, strict=True):
        spec = specs[index]
        flat = buffer[offset : offset + spec_num_bytes(spec)].view(parse_dtype(spec.dtype))
        tensors.append((spec.name, flat.reshape(spec.shape)))
    return tensors


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
