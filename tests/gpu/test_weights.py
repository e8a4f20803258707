"""Weights on one card: checksums on the device, and versions over CUDA IPC to a receiver that is then killed."""

from pathlib import Path

import torch

from protocol.checksum import checksum
from tests.benchmarks.bench_weights import measure_kills


def test_checksum_is_the_same_on_the_device() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape, dtype in (((3, 5), torch.float32), ((1 << 23, 9), torch.bfloat16), ((7,), torch.uint8)):
        tensor = (torch.rand(shape, generator=generator) * 200).to(dtype)
        assert checksum(tensor.cuda()) == checksum(tensor)


def test_receivers_killed_in_a_transfer_leave_the_others_and_no_descriptors(tmp_path: Path) -> None:
    figures = measure_kills(tmp_path, on_gpu=True, num_kills=2)
    assert figures["descriptor_leak"]["value"] == 0.0
