"""The learner's speed against a plain PyTorch loop in the same run, its MFU, and the memory of the log-prob head.

On a GPU: a dense model of 1.5 B parameters with random weights (Qwen2.5-1.5B's shape), 2 sequences of 8,192 tokens a
step. On CPUs: a small model, to see that it runs. ``run(quick)`` gives the figures of ``slipstream bench learner``;
run as a script it prints them as JSON. ``fraction_of_plain_loop`` compares like with like (both recompute all
activations); ``tokens_per_s`` and ``mfu`` are of the settings that the memory allows.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.algorithms.mfu import model_flops_utilisation
from learner.packing import ModelShape, model_shape, training_flops
from learner.trainer.batch import TrainBatch, TrajectoryArrays
from learner.trainer.engine import TrainerEngine
from learner.trainer.logprob import LogProbHead
from protocol.config import Config
from protocol.messages import BatchItem, BatchPlan
from tests.benchmarks.plain_loop import PlainLoop

LR = 1e-6


@dataclass(frozen=True)
class Case:
    """What is trained: the model's dimensions, and sequences of equal length."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    dtype: torch.dtype
    num_seqs: int
    num_tokens: int
    head_tokens: int
    head_hidden: int


GPU_CASE = Case(
    hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2, head_dim=128, vocab=151_936, tied=True,
    dtype=torch.bfloat16, num_seqs=2, num_tokens=8192, head_tokens=32_768, head_hidden=1536,
)  # fmt: skip
CPU_CASE = Case(
    hidden=256, intermediate=768, layers=4, heads=4, kv_heads=2, head_dim=64, vocab=4096, tied=True,
    dtype=torch.float32, num_seqs=2, num_tokens=512, head_tokens=32_768, head_hidden=64,
)  # fmt: skip
HEAD_VOCAB = 152_064


def build_model(case: Case, path: Path, *, device: torch.device) -> None:
    """Writes a Qwen2 model of this shape with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=case.vocab,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=case.tied,
        dtype=case.dtype,
    )
    torch.manual_seed(0)
    with device:
        model = Qwen2ForCausalLM(config).to(case.dtype)
    model.save_pretrained(path)


def build_batch(case: Case, *, step: int) -> TrainBatch:
    """One group of answers to a prompt of one token, all in one micro-batch."""
    rng = np.random.default_rng(step)
    num_response = case.num_tokens - 1
    items, arrays = [], {}
    for slot in range(case.num_seqs):
        item = BatchItem(
            group_id=step, slot=slot, prompt_id=f"p{step}", data_source="random", num_prompt_tokens=1,
            num_response_tokens=num_response, score=float(slot % 2), verdict="correct" if slot % 2 else "wrong",
            finish_reason="length", min_version=step, max_version=step, temperature=1.0, stage=0,
        )  # fmt: skip
        items.append(item)
        arrays[slot] = TrajectoryArrays(
            token_ids=rng.integers(0, case.vocab, case.num_tokens).astype(np.int32),
            logp_behaviour=np.full(num_response, -np.log(case.vocab), np.float32),
            versions=np.full(num_response, step, np.int32),
            loss_mask=np.ones(num_response, np.uint8),
        )
    plan = BatchPlan(
        batch_id=step + 1, policy_version=step, stage=0, items=items, micro_batches=[[list(range(case.num_seqs))]],
        fill_fraction=1.0, oldest_age_s=0.0,
    )  # fmt: skip
    return TrainBatch(plan=plan, arrays=arrays)


def engine_config(case: Case, model: Path, *, device: torch.device, **settings: Any) -> Config:
    """``settings``: ``share`` of the layers that recompute, ``liger``."""
    share = settings["share"]
    return Config.model_validate(
        {
            "run": {"dir": str(model.parent / "run"), "max_updates": 1_000_000},
            "model": {
                "path": str(model),
                "dtype": str(case.dtype).removeprefix("torch."),
                "gradient_checkpointing": share > 0,
                "checkpoint_share": share,
            },
            "data": {"train_files": ["none.jsonl"]},
            "sampling": {"max_response_tokens": case.num_tokens},
            "learner": {
                "groups_per_batch": 1,
                "group_size": case.num_seqs,
                "max_tokens_per_micro_batch": case.num_seqs * case.num_tokens,
                "liger": settings["liger"],
                "optim": {"lr": LR},
            },
            "trainer": {"device": device.type},
        }
    )


class EngineLoop:
    """The learner's engine, fed with ready batches."""

    def __init__(self, config: Config, *, case: Case, device: torch.device) -> None:
        self._case = case
        self._engine = TrainerEngine(config, rank=0, num_ranks=1, device=device)

    def step(self) -> float:
        result = self._engine.train_batch(build_batch(self._case, step=self._engine.policy_version))
        assert result.num_applied == 1
        return result.metrics["actor/loss"]

    def close(self) -> None:
        self._engine.close()
        del self._engine


def plain_step(loop: PlainLoop, case: Case) -> Callable[[], float]:
    """A step of the plain loop on the same kind of batch."""
    counter = iter(range(1_000_000))

    def step() -> float:
        arrays = build_batch(case, step=next(counter)).arrays
        ids = torch.from_numpy(np.stack([arrays[i].token_ids for i in range(case.num_seqs)]).astype(np.int64))
        weights = torch.tensor([1.0 if i % 2 else -1.0 for i in range(case.num_seqs)])
        return loop.step(ids.to(loop.device), weights.to(loop.device))

    return step


def timed(step: Callable[[], float], *, num: int, device: torch.device) -> list[float]:
    """Seconds of each of ``num`` steps."""
    seconds = []
    for _ in range(num):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def figure(values: list[float], unit: str) -> dict[str, object]:
    return {
        "value": statistics.median(values),
        "unit": unit,
        "spread": [min(values), max(values)],
        "num_runs": len(values),
    }


def compare(case: Case, model: Path, *, device: torch.device, rounds: int, steps: int) -> dict[str, list[float]]:
    """Median seconds a step in each round, of the plain loop and the engine with the same settings, in turns."""
    loop = PlainLoop(model, dtype=case.dtype, device=device, lr=LR)
    engine = EngineLoop(engine_config(case, model, device=device, share=1.0, liger=False), case=case, device=device)
    sides = {"plain": plain_step(loop, case), "engine": engine.step}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for step in sides.values():
        timed(step, num=2, device=device)
    for _ in range(rounds):
        for name, step in sides.items():
            seconds[name].append(statistics.median(timed(step, num=steps, device=device)))
    engine.close()
    return seconds


def recommended(
    case: Case, model: Path, *, device: torch.device, rounds: int, steps: int
) -> tuple[list[float], dict[str, Any]]:
    """Median seconds a step in each round with the fewest recomputed layers that fit, and those settings."""
    liger = device.type == "cuda" and _has_liger()
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        settings = {"share": share, "liger": liger}
        engine = None
        try:
            engine = EngineLoop(engine_config(case, model, device=device, **settings), case=case, device=device)
            timed(engine.step, num=2, device=device)
            seconds = [statistics.median(timed(engine.step, num=steps, device=device)) for _ in range(rounds)]
            return seconds, settings | _peak(device)
        except torch.OutOfMemoryError:
            pass
        finally:
            if engine is not None:
                engine.close()
            release(device)
    raise RuntimeError("the model does not fit on this device with any setting")


def _has_liger() -> bool:
    import importlib.util

    return importlib.util.find_spec("liger_kernel") is not None


def _peak(device: torch.device) -> dict[str, Any]:
    return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if device.type == "cuda" else {}


def release(device: torch.device) -> None:
    """Gives the memory of what was dropped back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def logprob_peak_bytes(case: Case, *, device: torch.device, num_tokens: int) -> float:
    """Peak memory beyond inputs and their gradients of log-probs and entropies, forward and backward, per token."""
    hidden = torch.randn(num_tokens, case.head_hidden, dtype=case.dtype, device=device, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(HEAD_VOCAB, case.head_hidden, dtype=case.dtype, device=device) * 0.02)
    token = torch.randint(0, HEAD_VOCAB, (num_tokens,), device=device)
    temperature = torch.ones(num_tokens, device=device)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    head = LogProbHead(weight, chunk_tokens=1024)
    read_peak = _peak_reader(device)
    logp, entropy = head(hidden, token, temperature)
    (logp.sum() + 0.1 * entropy.sum()).backward()
    return read_peak() / num_tokens


def _peak_reader(device: torch.device) -> Callable[[], float]:
    """Returns a function that tells by how many bytes memory peaked above the level of now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return lambda: float(torch.cuda.max_memory_allocated() - before)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark of the resident size
    resident = _status_kb("VmRSS")
    return lambda: 1024.0 * (_status_kb("VmHWM") - resident)


def _status_kb(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {key}")


def _mfu(seconds: float, *, case: Case, shape: ModelShape, device: torch.device) -> float:
    """MFU by the device table; on CPUs against the rate of a large matrix product on the same threads."""
    lengths = [case.num_tokens] * case.num_seqs
    if device.type == "cuda":
        share = model_flops_utilisation(
            lengths, shape=shape, seconds=seconds, num_devices=1, device_name=torch.cuda.get_device_name(device)
        )
        return float("nan") if share is None else share
    return float(training_flops(lengths, shape=shape).sum()) / seconds / _matmul_rate(case.dtype)


def _matmul_rate(dtype: torch.dtype, size: int = 1024) -> float:
    a = torch.randn(size, size, dtype=dtype)
    seconds = timed(lambda: float((a @ a)[0, 0]), num=5, device=torch.device("cpu"))
    return 2 * size**3 / min(seconds)


def run(quick: bool = False) -> dict[str, dict[str, object]]:
    """Figures ``tokens_per_s``, ``fraction_of_plain_loop``, ``mfu``, ``logprob_peak_bytes_per_token`` and more."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    case = GPU_CASE if on_gpu else CPU_CASE
    rounds, steps = (2, 2) if quick else (5, 4)
    head_tokens = 4096 if quick else case.head_tokens
    tokens = case.num_seqs * case.num_tokens
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        build_model(case, model, device=device)
        release(device)
        shape = model_shape(model)
        assert shape is not None
        seconds = compare(case, model, device=device, rounds=rounds, steps=steps)
        release(device)
        best, settings = recommended(case, model, device=device, rounds=rounds, steps=steps)
    peak = logprob_peak_bytes(case, device=device, num_tokens=head_tokens)
    pairs = list(zip(seconds["plain"], seconds["engine"], strict=True))

    def mfu(values: list[float]) -> dict[str, object]:
        unit = "of the device's peak" if on_gpu else "of a matrix product's rate here"
        return figure([_mfu(s, case=case, shape=shape, device=device) for s in values], unit)

    described = ", ".join(f"{name} {value:.3g}" for name, value in settings.items())
    return {
        "tokens_per_s": figure([tokens / s for s in best], f"tokens/s ({described})"),
        "fraction_of_plain_loop": figure([a / b for a, b in pairs], "of the plain loop's speed, same settings"),
        "mfu": mfu(best),
        "logprob_peak_bytes_per_token": figure(
            [peak], f"bytes beyond inputs and gradients, {head_tokens} tokens, vocabulary {HEAD_VOCAB}"
        ),
        "plain_tokens_per_s": figure([tokens / s for s in seconds["plain"]], "tokens/s"),
        "plain_mfu": mfu(seconds["plain"]),
        "same_settings_tokens_per_s": figure([tokens / s for s in seconds["engine"]], "tokens/s"),
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
