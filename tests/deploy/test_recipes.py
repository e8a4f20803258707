"""Every recipe passes the checks, and its memory estimate fits the hardware its first line names."""

import re
from pathlib import Path

import pytest

from deploy.demo.recipe import RECIPES
from protocol.config.checks import check_config
from protocol.config.load import load_config
from protocol.config.memory import GIB, ModelFacts, kv_sequences, trainer_memory

QWEN = {"num_heads": 28, "num_kv_heads": 4, "head_dim": 128, "vocab_size": 152064, "tied": False}
MODELS = {
    "Qwen2.5-0.5B-Instruct": ModelFacts(
        num_layers=24,
        hidden_size=896,
        intermediate_size=4864,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=151936,
        tied=True,
    ),
    "Qwen2.5-7B-Instruct": ModelFacts(num_layers=28, hidden_size=3584, intermediate_size=18944, **QWEN),
    "DeepSeek-R1-Distill-Qwen-7B": ModelFacts(num_layers=28, hidden_size=3584, intermediate_size=18944, **QWEN),
    "DeepSeek-R1-Distill-Qwen-32B": ModelFacts(
        num_layers=64,
        hidden_size=5120,
        intermediate_size=27648,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=152064,
        tied=False,
    ),
}
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith("demo"))


def test_the_recipes_are_there() -> None:
    assert {"gsm8k_0.5b", "seq_balance_7b", "or1_math_7b", "or1_32b", "code_7b"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_passes_the_checks_and_fits_its_hardware(name: str) -> None:
    path = RECIPES / f"{name}.yaml"
    loaded = load_config(path)
    assert [str(finding) for finding in check_config(loaded)] == []
    config = loaded.config
    found = re.match(r"# Hardware: (\d+) GPUs? of (\d+) GiB", path.read_text())
    assert found is not None, "the first line names the hardware"
    num_gpus, device_bytes = int(found[1]), int(found[2]) * GIB
    needed = config.trainer.num_ranks + config.generators.num * config.generators.tensor_parallel_size
    facts = MODELS[Path(config.model.path).name]
    estimate = trainer_memory(facts, config)
    if num_gpus > 1:
        assert needed <= num_gpus
        assert estimate.fits(device_bytes), f"{estimate.total / GIB:.1f} GiB of {estimate.parts}"
    else:
        assert estimate.total + config.generators.gpu_memory_utilization * device_bytes <= device_bytes
    assert kv_sequences(facts, config, device_bytes=device_bytes) >= 8
