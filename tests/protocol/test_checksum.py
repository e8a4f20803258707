"""The checksum sees order, packing and single bits, and is one function for NumPy and torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import checksum as module
from protocol.checksum import checksum, checksum_on_device


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=200), chunk=st.integers(1, 9))
def test_numpy_and_torch_agree_for_any_length_and_chunk(data: bytes, chunk: int) -> None:
    array = np.frombuffer(data, dtype=np.uint8).copy()
    expected = checksum(array)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CPU_CHUNK_WORDS", chunk)
        patch.setattr(module, "_DEVICE_CHUNK_WORDS", chunk)
        assert checksum(array) == expected
        assert checksum(torch.from_numpy(array)) == expected
        assert checksum_on_device(torch.from_numpy(array)) == expected
    assert 0 <= expected < 1 << 64


@settings(max_examples=50, deadline=None)
@given(data=st.binary(min_size=1, max_size=100), bit=st.integers(0, 799))
def test_one_flipped_bit_changes_the_value(data: bytes, bit: int) -> None:
    array = np.frombuffer(data, dtype=np.uint8).copy()
    before = checksum(array)
    array[bit // 8 % array.size] ^= np.uint8(1 << bit % 8)
    assert checksum(array) != before


def test_order_and_length_matter() -> None:
    array = np.arange(1000, dtype=np.float32)
    swapped = array.copy()
    swapped[[3, 700]] = swapped[[700, 3]]
    assert checksum(array) != checksum(swapped)
    assert checksum(np.zeros(8, np.uint8)) != checksum(np.zeros(16, np.uint8))
    assert checksum(array) == checksum(array.reshape(10, 100))


def test_views_count_only_their_own_bytes() -> None:
    tensor = torch.randn(64, 64).to(torch.bfloat16)
    flat = torch.cat([torch.zeros(3, dtype=torch.bfloat16), tensor.reshape(-1)])
    assert checksum(flat[3:]) == checksum(tensor) == checksum_on_device(flat[3:])
    assert checksum(tensor.T) == checksum(tensor.T.contiguous())
    assert checksum(tensor.T) != checksum(tensor)


def test_value_is_pinned() -> None:
    """Both ends of a link may run different releases: the value for given bytes must never change."""
    assert checksum(np.arange(5, dtype="<u4")) == PINNED


PINNED = 0x568EC912748FD676
