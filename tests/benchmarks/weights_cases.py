"""Models of the benchmark of weights: their folders (no weights: the engine starts from random ones) and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from learner.weights.snapshot import Snapshot
from protocol.config import Config


@dataclass(frozen=True)
class Size:
    """A dense model; the key it appears under."""

    key: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool


SIZES = (
    Size("0_5b", 896, 4864, 24, 14, 2, 151_936, True),
    Size("1_5b", 1536, 8960, 28, 12, 2, 151_936, True),
    Size("7b", 3584, 18_944, 28, 28, 4, 152_064, False),
)
TINY = Size("gloo", 128, 256, 2, 4, 2, 320, False)


def write_folder(size: Size, folder: Path) -> dict[str, torch.Size]:
    """Writes config and a tokenizer; returns names and shapes of the checkpoint's tensors."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.support.tiny_model import build_tiny_tokenizer

    config = Qwen2Config(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.intermediate,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
        max_position_embeddings=4096, tie_word_embeddings=size.tied, dtype=torch.bfloat16,
        architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    build_tiny_tokenizer(folder)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return shapes


def random_weights(shapes: dict[str, torch.Size], *, device: torch.device) -> dict[str, torch.Tensor]:
    """The trainer's weights: small random numbers in bfloat16."""
    torch.manual_seed(0)
    return {name: torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(0.02) for name, shape in shapes.items()}


def snapshot_of(weights: dict[str, torch.Tensor], policy_version: int) -> Snapshot:
    """What the trainer's ranks do at a step boundary: a copy of everything."""
    snapshot = Snapshot(policy_version=policy_version, tensors=[(name, t.clone()) for name, t in weights.items()])
    if snapshot.tensors[0][1].device.type == "cuda":
        torch.cuda.synchronize()
    return snapshot


def bench_config(folder: Path, *, run_dir: Path, on_gpu: bool, backend: str = "vllm", **weights: Any) -> Config:
    """One generator and a publisher on this machine's device."""
    engine_args: dict[str, Any] = {"pause_s": 0.001}
    if backend == "vllm":
        extension = "tests.benchmarks.native_transfer.NativeTransfer"
        engine_args = {"worker_extension_cls": extension} if on_gpu else {}
    return Config.model_validate(
        {
            "run": {"dir": str(run_dir)},
            "model": {"path": str(folder), "dtype": "bfloat16"},
            "data": {"train_files": ["none"], "max_prompt_tokens": 64},
            "sampling": {"max_response_tokens": 1024},
            "generators": {
                "backend": backend, "device": "cuda" if on_gpu else "cpu", "load_format": "dummy",
                "max_num_seqs": 256 if on_gpu else 8, "max_num_batched_tokens": 8192 if on_gpu else 2048,
                "gpu_memory_utilization": 0.3, "enforce_eager": True, "threads": 1, "engine_args": engine_args,
            },
            "weights": weights,
            "transport": {"heartbeat_s": 0.25, "peer_timeout_s": 4.0},
        }
    )  # fmt: skip
