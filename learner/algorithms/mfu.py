"""Model FLOPs utilisation with a declared formula and an exact device table. Pure Python and numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from learner.packing.flops import ModelShape, training_flops

PEAK_BF16_FLOPS: dict[str, float] = {
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H20": 148e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
}
"""Dense bf16 tensor-core peak in FLOP/s by the exact name that the driver reports (``torch.cuda.get_device_name``)."""


def model_flops_utilisation(
    lengths: Sequence[int] | NDArray[np.int64],
    *,
    shape: ModelShape,
    seconds: float,
    num_devices: int,
    device_name: str,
) -> float | None:
    """Share of the peak that training on sequences of these lengths reached; None on a device not in the table.

    ``sum_s (6 N s + 6 s^2 L H d) / (seconds num_devices peak)``: forward and backward, causal attention, one pass over
    the data, no recomputation counted (see ``ModelShape``). A name must match exactly: "H200" is not "H20".
    """
    if seconds <= 0 or num_devices < 1:
        raise ValueError(f"MFU needs seconds > 0 and num_devices >= 1, got {seconds} and {num_devices}")
    peak = PEAK_BF16_FLOPS.get(device_name)
    if peak is None:
        return None
    return float(training_flops(lengths, shape=shape).sum()) / (seconds * num_devices * peak)
