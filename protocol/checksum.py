"""One 64-bit, position-dependent checksum, equal for NumPy arrays and for torch tensors on any device.

Definition. The C-contiguous bytes, padded with zeros to a multiple of 8, are little-endian 64-bit words w_0 .. w_{n-1};
all arithmetic is modulo 2^64 and shifts are logical:

    x_i = w_i + (i + 1) * GOLDEN
    y_i = (x_i ^ (x_i >> 32)) * MULTIPLIER
    checksum = sum_i (y_i ^ (y_i >> 29)) + num_bytes * GOLDEN

A sum needs no order, so any chunk size and any device give the same value; the mixing makes it depend on every word's
position, so swapped, shifted or differently packed data of equal total is seen. It guards against mistakes and damaged
memory, not against an adversary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

import numpy as np

if TYPE_CHECKING:
    import torch

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1
_CPU_CHUNK_WORDS = 1 << 16
_DEVICE_CHUNK_WORDS = 1 << 22

Array = Union[np.ndarray, "torch.Tensor"]


def checksum(data: Array) -> int:
    """Checksum of an array's bytes, 0 <= value < 2^64; shape and dtype do not enter, only bytes and their order.

    Args:
        data: NumPy array or torch tensor (any dtype, any device; copied only when it is not contiguous).
    """
    if isinstance(data, np.ndarray):
        return _checksum_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
    if data.device.type != "cpu":
        return checksum_on_device(data)
    return _checksum_numpy(_as_bytes(data).numpy())


def checksum_on_device(tensor: torch.Tensor) -> int:
    """The same value computed by the tensor's own device, a few kernels per 32 MiB."""
    total, num_bytes = _sum_torch(tensor)
    return (total + num_bytes * GOLDEN) & _MASK


def _checksum_numpy(flat: np.ndarray) -> int:
    return (_sum_numpy(flat) + flat.size * GOLDEN) & _MASK


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _sum_numpy(flat: np.ndarray) -> int:
    num_words = flat.size // 8
    words = flat[: num_words * 8].view("<u8")
    positions = np.arange(1, min(_CPU_CHUNK_WORDS, num_words) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    total = 0
    for start in range(0, num_words, _CPU_CHUNK_WORDS):
        chunk = words[start : start + _CPU_CHUNK_WORDS]
        x = chunk + positions[: chunk.size]
        x += np.uint64(start * GOLDEN & _MASK)
        x ^= x >> np.uint64(32)
        x *= np.uint64(MULTIPLIER)
        x ^= x >> np.uint64(29)
        total += int(x.sum(dtype=np.uint64))
    return total + _tail(flat[num_words * 8 :].tobytes(), num_words)


def _sum_torch(tensor: torch.Tensor) -> tuple[int, int]:
    import torch

    flat = _as_bytes(tensor)
    if flat.storage_offset() % 8 or flat.data_ptr() % 8:
        flat = flat.clone()
    num_words = flat.numel() // 8
    if num_words == 0:
        return _tail(bytes(flat.tolist()), 0), flat.numel()
    words = flat[: num_words * 8].view(torch.int64)
    positions = torch.arange(1, min(_DEVICE_CHUNK_WORDS, num_words) + 1, dtype=torch.int64, device=flat.device)
    positions *= _signed(GOLDEN)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, num_words, _DEVICE_CHUNK_WORDS):
        chunk = words[start : start + _DEVICE_CHUNK_WORDS]
        x = chunk + positions[: chunk.numel()]
        x += _signed(start * GOLDEN & _MASK)
        x ^= (x >> 32) & ((1 << 32) - 1)
        x *= _signed(MULTIPLIER)
        x ^= (x >> 29) & ((1 << 35) - 1)
        total += x.sum()
    rest = bytes(flat[num_words * 8 :].tolist())
    return (int(total.item()) & _MASK) + _tail(rest, num_words), flat.numel()


def _tail(rest: bytes, index: int) -> int:
    """Term of the last, incomplete word (0 when there is none)."""
    if not rest:
        return 0
    x = (int.from_bytes(rest, "little") + (index + 1) * GOLDEN) & _MASK
    x = ((x ^ (x >> 32)) * MULTIPLIER) & _MASK
    return x ^ (x >> 29)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
