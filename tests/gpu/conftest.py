"""Tests of what only a GPU can show; all are skipped, with the reason, where torch sees none."""

import pytest
import torch


@pytest.fixture(autouse=True)
def needs_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU on this machine")
