import pytest

from learner.algorithms.mfu import PEAK_BF16_FLOPS, model_flops_utilisation
from learner.packing import ModelShape

SHAPE = ModelShape(num_layers=2, num_heads=4, head_dim=8, num_matmul_params=10_000)


def test_mfu_follows_the_declared_formula() -> None:
    flops = sum(6 * 10_000 * s + 6 * s * s * 2 * 4 * 8 for s in (100, 300))
    actual = model_flops_utilisation([100, 300], shape=SHAPE, seconds=2.0, num_devices=4, device_name="NVIDIA H200")
    assert actual == pytest.approx(flops / (2.0 * 4 * 989e12))


def test_devices_match_by_exact_name_and_unknown_ones_have_no_figure() -> None:
    assert PEAK_BF16_FLOPS["NVIDIA H200"] != PEAK_BF16_FLOPS["NVIDIA H20"]
    for name in ("H200", "NVIDIA H2000", "cpu"):
        assert model_flops_utilisation([9], shape=SHAPE, seconds=1.0, num_devices=1, device_name=name) is None


def test_no_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="seconds > 0"):
        model_flops_utilisation([9], shape=SHAPE, seconds=0.0, num_devices=1, device_name="NVIDIA H200")
