"""A sampler without a model: random tokens at a set speed, for tests, chaos and benchmarks.

Options are taken from `generators.engine_args`:

    tokens_per_s    of each request (default 200)
    length          constant | uniform | geometric (default geometric), with mean `mean_tokens` (default 64)
    p_correct       share of answers that end in \\boxed{answer} rather than \\boxed{answer + "1"} (default 0.5)
    answer          the correct answer (default "42")
    pause_s         how long a version load takes (default 0.01)
    receive         take part in real weight transfers (default true; needs torch; on the GPU with
                    generators.device=cuda); false: follow the coordinator
    stall_after_s, die_after_s   stop producing tokens, or fail, this long after the start (default 0 = never)

Tokens of a request depend only on run.seed and its id. They obey versions exactly as a real engine's do: a token
belongs to the version in use at the moment it was due.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from generators.backends.base import EngineFailed, Sample, SampleRequest, WorkerInfo
from protocol.config import Config

_OPTIONS: dict[str, str | float | bool] = {
    "tokens_per_s": 200.0,
    "length": "geometric",
    "mean_tokens": 64,
    "p_correct": 0.5,
    "answer": "42",
    "pause_s": 0.01,
    "receive": True,
    "stall_after_s": 0.0,
    "die_after_s": 0.0,
}


@dataclass
class _Running:
    """One request: what it will say, and when."""

    token_ids: np.ndarray
    started: float
    natural_end: bool
    lost_s: float = 0.0
    starts: list[tuple[int, int]] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedBackend:
    """`Backend` that plays answers by the clock."""

    def __init__(self, config: Config, *, name: str) -> None:
        unknown = sorted(set(config.generators.engine_args) - set(_OPTIONS))
        if unknown:
            raise ValueError(
                f"generators.engine_args: backend scripted knows no {', '.join(unknown)}; it has {', '.join(_OPTIONS)}"
            )
        self._options: dict[str, Any] = {**_OPTIONS, **config.generators.engine_args}
        self._config = config
        self._version = -1
        self._running: dict[str, _Running] = {}
        self._endings: tuple[list[int], list[int]] = ([], [])
        self._gate = asyncio.Event()
        self._started = 0.0
        self._receiver: Any = None

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def worker_info(self) -> WorkerInfo:
        receives = bool(self._options["receive"])
        return WorkerInfo(
            num_workers=1 if receives else 0,
            transports=_transports(self._config.generators.device) if receives else [],
            device="cuda" if self._config.generators.device == "cuda" else "cpu",
            device_uuids=[],
        )

    async def start(self, *, stage_address: str | None) -> None:
        self._endings = await asyncio.to_thread(self._tokenize_endings)
        if stage_address and self._options["receive"]:
            self._receiver = await asyncio.to_thread(_start_receiver, stage_address, self._config)
        self._started = time.monotonic()
        self._version = 0
        self._gate.set()

    def _tokenize_endings(self) -> tuple[list[int], list[int]]:
        folder = self._config.model.tokenizer_path or self._config.model.path
        if not (Path(folder) / "tokenizer.json").exists():
            return [], []
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        answer = str(self._options["answer"])
        texts = [f" The answer is \\boxed{{{text}}}" for text in (answer, answer + "1")]
        correct, wrong = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        return correct, wrong

    async def sample(self, request: SampleRequest) -> Sample:
        await self._gate.wait()
        running = self._script(request)
        self._running[request.request_id] = running
        try:
            while not running.aborted.is_set() and self._count(running) < running.token_ids.size:
                self._check_alive()
                wait_s = self._due(running) - time.monotonic()
                try:
                    await asyncio.wait_for(running.aborted.wait(), max(0.001, min(wait_s, 0.25)))
                except TimeoutError:
                    continue
            return self._cut(request, running)
        finally:
            del self._running[request.request_id]

    def _script(self, request: SampleRequest) -> _Running:
        rng = np.random.default_rng([self._config.run.seed, crc32(request.request_id.encode())])
        sampling, mean = request.sampling, int(self._options["mean_tokens"])
        draws = {
            "constant": lambda: mean,
            "uniform": lambda: int(rng.integers(1, 2 * mean)),
            "geometric": lambda: int(rng.geometric(1 / mean)),
        }
        ending = self._endings[0 if rng.random() < float(self._options["p_correct"]) else 1]
        stop = list(sampling.stop_token_ids[:1])
        body = max(draws[str(self._options["length"])](), sampling.min_tokens)
        tokens = [*rng.integers(0, 200, size=body).tolist(), *ending, *stop]
        cut = np.asarray(tokens[: sampling.max_tokens], dtype=np.int32)
        return _Running(
            token_ids=cut,
            started=time.monotonic(),
            natural_end=cut.size == len(tokens) and bool(stop),
            starts=[(self._version, 0)],
        )

    def _cut(self, request: SampleRequest, running: _Running) -> Sample:
        count = self._count(running)
        done = count == running.token_ids.size
        starts = running.starts
        ends = [start for _, start in starts[1:]] + [count]
        rng = np.random.default_rng([self._config.run.seed, crc32(request.request_id.encode()), 1])
        logp = -rng.exponential(0.5, size=running.token_ids.size).astype(np.float32)
        return Sample(
            token_ids=running.token_ids[:count],
            logp_behaviour=logp[:count],
            versions=np.repeat(
                np.asarray([version for version, _ in starts], dtype=np.int32),
                [end - start for (_, start), end in zip(starts, ends, strict=True)],
            ),
            finish_reason=("stop" if running.natural_end else "length") if done else "aborted",
            stop_reason=str(running.token_ids[-1]) if done and running.natural_end else "",
        )

    def _count(self, running: _Running) -> int:
        now = time.monotonic()
        stall_after_s = float(self._options["stall_after_s"])
        if stall_after_s:
            now = min(now, self._started + stall_after_s)
        elapsed = max(0.0, now - running.started - running.lost_s)
        return min(running.token_ids.size, int(elapsed * float(self._options["tokens_per_s"])))

    def _due(self, running: _Running) -> float:
        return running.started + running.lost_s + running.token_ids.size / float(self._options["tokens_per_s"])

    def _check_alive(self) -> None:
        die_after_s = float(self._options["die_after_s"])
        if die_after_s and time.monotonic() > self._started + die_after_s:
            raise EngineFailed(f"scripted death after {die_after_s:g} s")

    async def abort(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is not None:
            running.aborted.set()

    def progress(self) -> Mapping[str, int]:
        return {request_id: self._count(running) for request_id, running in self._running.items()}

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def load_version(self, policy_version: int) -> float:
        pause_s = float(self._options["pause_s"])
        self._gate.clear()
        if self._receiver is not None:
            self._receiver.staged(policy_version)
        for running in self._running.values():
            running.starts.append((policy_version, self._count(running)))
            running.lost_s += pause_s
        await asyncio.sleep(pause_s)
        self._version = policy_version
        self._gate.set()
        return pause_s

    async def check_health(self) -> None:
        self._check_alive()

    def child_pids(self) -> list[int]:
        return []

    async def close(self) -> None:
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.close)


def _transports(device: str) -> list[str]:
    return ["nccl", "ipc", "gloo", "file"] if device == "cuda" else ["gloo", "file"]


def _start_receiver(stage_address: str, config: Config) -> Any:
    import torch

    from generators.weights.coverage import checkpoint_tensors, is_tied
    from generators.weights.receiver import Receiver

    folder = config.model.path
    receiver = Receiver(
        stage_address,
        worker=0,
        device=torch.device("cuda", 0) if config.generators.device == "cuda" else torch.device("cpu"),
        expected=checkpoint_tensors(folder),
        tied=is_tied(folder),
    )
    receiver.start()
    return receiver
