"""Our generator's path against vLLM's own offline path: same model, prompts, lengths and concurrency, in one run.

Each side runs in a process of its own, one after the other, and repeats its measurement.
Ours is `VllmBackend.sample` with everything a trajectory needs: the log-prob of
every sampled token, final-only outputs, versions per token. vLLM's is `LLM.generate` without log-probs. Random weights
(Qwen2.5-1.5B's shape on a GPU), answers of a fixed length.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from protocol.config import Config
from protocol.messages import SamplingParams
from tests.benchmarks.generator_peer import MARK
from tests.benchmarks.weights_cases import SIZES, TINY, write_folder

START_S = 500.0


@dataclass(frozen=True)
class Work:
    """What is asked for in one round."""

    num_requests: int
    num_prompt_tokens: int
    num_tokens: int
    rounds: int

    def prompts(self, turn: int) -> list[list[int]]:
        """Different prompts each round, so that no cache answers."""
        return [
            [(request * 31 + turn * 17 + i * i) % 250 for i in range(self.num_prompt_tokens)]
            for request in range(self.num_requests)
        ]


def bench_config(folder: Path, *, on_gpu: bool) -> Config:
    """One engine; prefix caching as a run has it."""
    return Config.model_validate(
        {
            "run": {"dir": str(folder)},
            "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
            "data": {"train_files": ["none"], "max_prompt_tokens": 256},
            "sampling": {"max_response_tokens": 768},
            "generators": {
                "device": "cuda" if on_gpu else "cpu", "load_format": "dummy", "max_num_seqs": 256 if on_gpu else 8,
                "max_num_batched_tokens": 8192 if on_gpu else 2048, "gpu_memory_utilization": 0.8, "threads": 1,
            },
        }
    )  # fmt: skip


def say(**fields: Any) -> None:
    """One line for the parent."""
    print(MARK + json.dumps(fields), flush=True)


async def run_ours(config: Config, work: Work) -> None:
    """Tokens per second of each round through `VllmBackend`; the first one warms up."""
    from generators.backends.base import SampleRequest
    from generators.backends.vllm import VllmBackend

    backend = VllmBackend(config, name="g0")
    await backend.start(stage_address=None)
    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, max_tokens=work.num_tokens, min_tokens=0, stop_token_ids=(),
        stop=(), repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, seed=None,
    )  # fmt: skip
    for turn in range(work.rounds + 1):
        requests = [
            SampleRequest(request_id=f"{turn}/{number}", prompt_token_ids=prompt, sampling=sampling)
            for number, prompt in enumerate(work.prompts(turn))
        ]
        started = time.monotonic()
        samples = await asyncio.gather(*(backend.sample(request) for request in requests))
        num_tokens = sum(sample.num_tokens for sample in samples)
        if turn:
            say(tokens_per_s=num_tokens / (time.monotonic() - started))
    await backend.close()


def run_offline(config: Config, work: Work) -> None:
    """The same through `vllm.LLM`."""
    from generators import vllm_adapter as adapter

    generators = config.generators
    on_gpu = generators.device == "cuda"
    adapter.set_environment(
        device=generators.device, num_threads=1, kv_cache_gb=generators.cpu_kv_cache_gb,
        sockets=adapter.socket_folder(Path(config.run.dir), "offline"),
    )  # fmt: skip
    from vllm import LLM
    from vllm import SamplingParams as VllmSamplingParams

    options: dict[str, Any] = {"gpu_memory_utilization": generators.gpu_memory_utilization} if on_gpu else {}
    engine = LLM(
        config.model.path, dtype="bfloat16", load_format="dummy", seed=0, disable_log_stats=True,
        max_model_len=config.data.max_prompt_tokens + config.sampling.max_response_tokens,
        max_num_seqs=generators.max_num_seqs, max_num_batched_tokens=generators.max_num_batched_tokens,
        enforce_eager=not on_gpu, generation_config="vllm", **options,
    )  # fmt: skip
    params = VllmSamplingParams(temperature=1.0, max_tokens=work.num_tokens, ignore_eos=True, detokenize=False)
    for turn in range(work.rounds + 1):
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in work.prompts(turn)]
        started = time.monotonic()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        if turn:
            say(tokens_per_s=num_tokens / (time.monotonic() - started))


def measure(side: str, config: Config, work: Work) -> list[float]:
    """Runs one side in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_generator", side, config.model_dump_json()]
    command.append(json.dumps([work.num_requests, work.num_prompt_tokens, work.num_tokens, work.rounds]))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=START_S, env=dict(os.environ))
    said = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if len(said) != work.rounds:
        raise RuntimeError(f"{side} ended with {done.returncode}: {done.stdout[-1000:]}")
    return [float(line["tokens_per_s"]) for line in said]


def figure(values: list[float], unit: str) -> dict[str, object]:
    """One entry of the JSON."""
    spread = [min(values), max(values)]
    return {"value": statistics.median(values), "unit": unit, "spread": spread, "num_runs": len(values)}


def run(quick: bool = False) -> dict[str, dict[str, object]]:
    """Figures ``fraction_of_vllm_offline`` and ``tokens_per_s`` of ``slipstream bench generator``."""
    on_gpu = torch.cuda.is_available()
    rounds = 2 if quick else 4
    work = Work(512, 128, 512, rounds) if on_gpu else Work(32, 32, 64, rounds)
    with tempfile.TemporaryDirectory(prefix="bench-generator-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_folder(SIZES[1] if on_gpu else TINY, folder / "model")
        config = bench_config(folder, on_gpu=on_gpu)
        offline = measure("offline", config, work)
        ours = measure("ours", config, work)
    return {
        "fraction_of_vllm_offline": figure([value / statistics.median(offline) for value in ours], "of its tokens/s"),
        "tokens_per_s": figure(ours, f"tokens/s, {work.num_requests} requests of {work.num_tokens} tokens"),
        "vllm_offline_tokens_per_s": figure(offline, "tokens/s"),
    }


def main() -> None:
    """One side (the child), or all of it as JSON."""
    if len(sys.argv) == 1:
        print(json.dumps(run(), indent=2))
        return
    config, work = Config.model_validate_json(sys.argv[2]), Work(*json.loads(sys.argv[3]))
    if sys.argv[1] == "ours":
        asyncio.run(run_ours(config, work))
    else:
        run_offline(config, work)


if __name__ == "__main__":
    main()
