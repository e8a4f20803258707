"""Fixtures of the trainer's tests: a tiny model, and engines of one rank on it."""

import pytest

from tests.support.tiny_model import build_tiny_model
from tests.support.training import tiny_config


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(model_path, tmp_path):
    """Makes engines with sections of the configuration changed; closes them after the test."""
    import torch

    from learner.trainer.engine import TrainerEngine

    engines = []

    def build(**sections):
        config = tiny_config(model_path, tmp_path, **sections)
        engines.append(TrainerEngine(config, rank=0, num_ranks=1, device=torch.device("cpu")))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()
