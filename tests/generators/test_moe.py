"""A mixture of experts: from transformers' fused parameters through a snapshot into a real engine."""

from pathlib import Path

import pytest
import torch

from learner.trainer.export import checkpoint_tensors
from learner.weights.snapshot import Snapshot
from tests.generators.engine import Engine, log_ratio, requests
from tests.support.tiny_model import build_tiny_moe


def fused(folder: Path) -> tuple[torch.nn.Module, list[tuple[str, torch.Tensor]]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def test_a_snapshot_has_the_checkpoints_names_and_values(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = build_tiny_moe(tmp_path)
    model, parameters = fused(folder)
    stored = load_file(folder / "model.safetensors")
    tensors = dict(checkpoint_tensors(model, parameters))
    assert len(tensors) > len(parameters)
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensors[name], stored[name]) and tensors[name].is_contiguous() for name in stored)


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_an_update_of_all_experts_serves_the_new_policy(tmp_path: Path) -> None:
    folders = [build_tiny_moe(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    engine = Engine(folders[0], tmp_path / "run")
    try:
        asked = requests("before", 2)
        for request, sample in zip(asked, engine.sample(asked), strict=True):
            assert log_ratio(folders[0], request, sample).max() < 1e-3
        model, parameters = fused(folders[1])
        engine.publisher.submit(Snapshot(policy_version=1, tensors=checkpoint_tensors(model, parameters)))
        assert engine.publisher.wait_idle(60.0)
        assert engine.publisher.status()["holders"] == ["g0"], engine.publisher.status()
        asked = requests("after", 2)
        for request, sample in zip(asked, engine.sample(asked), strict=True):
            assert log_ratio(folders[1], request, sample).max() < 1e-3
    finally:
        engine.close()
