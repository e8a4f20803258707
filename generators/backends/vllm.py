"""vLLM in this process (its engine core and workers are child processes), driven through `AsyncLLM`.

Policy versions and caches. `kv_on_update: keep` keeps running requests' keys and values and salts the prefix cache with
the version at submission, so no request that starts after an update reuses older ones. A request that was still waiting
inside the engine at the pause would break that rule (old salt, new weights): the gate stops submissions and the update
waits until every request has its first token; if that takes too long, this one update recomputes instead.
`recompute` drops all caches, and running requests are prefilled again.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from generators import vllm_adapter as adapter
from generators.backends.base import EngineFailed, RequestFailed, Sample, SampleRequest, WorkerInfo
from generators.text import Decoder
from generators.weights.coverage import is_tied
from generators.weights.plugin import ENVIRONMENT_KEY, WorkerSetup
from protocol.config import Config
from protocol.logs import event

log = logging.getLogger(__name__)

_FIRST_TOKEN_WAIT_S = 5.0


class VllmBackend:
    """`Backend` over an in-process vLLM."""

    def __init__(self, config: Config, *, name: str) -> None:
        self._name = name
        self._config = config
        self.kv_on_update = config.weights.kv_on_update
        self._device = _device(config)
        self._engine: Any = None
        self._capabilities: adapter.Capabilities | None = None
        self._version = -1
        self._gate = asyncio.Event()
        self._running: dict[str, list[tuple[int, int]]] = {}
        self._prompt_tokens: dict[str, int] = {}
        # Children die with the thread that started them (see generators.weights.plugin), so it lives as long as we do.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-starter")

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def worker_info(self) -> WorkerInfo:
        config = self._config
        transports = ["file", "gloo"] if self._device == "cpu" else ["nccl", "ipc", "gloo", "file"]
        return WorkerInfo(
            num_workers=config.generators.tensor_parallel_size,
            transports=transports,
            device=self._device,
            device_uuids=[],
        )

    async def start(self, *, stage_address: str | None) -> None:
        config = self._config
        threads = config.generators.threads or max(1, len(os.sched_getaffinity(0)) // 2)
        adapter.set_environment(
            device=self._device,
            num_threads=threads,
            kv_cache_gb=config.generators.cpu_kv_cache_gb,
            sockets=adapter.socket_folder(Path(config.run.dir), self._name),
        )
        setup = WorkerSetup(
            main_pid=os.getpid(),
            stage_address=stage_address or "",
            model_path=config.model.path if config.generators.load_format != "dummy" else "",
            num_tokens=Decoder(config.model.tokenizer_path or config.model.path).num_ids,
            tied=is_tied(config.model.path),
        )
        os.environ[ENVIRONMENT_KEY] = msgspec.json.encode(setup).decode()
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            self._capabilities = await loop.run_in_executor(self._starter, adapter.probe)
            build = loop.run_in_executor(self._starter, self._build)
            self._engine = await asyncio.wait_for(build, config.generators.engine_start_s)
        except TimeoutError:
            raise EngineFailed(
                f"the engine did not start within generators.engine_start_s = {config.generators.engine_start_s:g} s"
            ) from None
        except (RuntimeError, ValueError, OSError, ImportError) as error:
            raise EngineFailed(f"the engine did not start: {str(error).strip()}") from error
        await adapter.set_version_label(self._engine, 0, capabilities=self._capabilities)
        self._version = 0
        self._gate.set()
        seconds = round(time.monotonic() - started, 1)
        event(log, logging.INFO, "engine started", seconds=seconds, vllm=self._capabilities.version)

    def _build(self) -> Any:
        config = self._config
        lengths = [stage.max_response_tokens or 0 for stage in config.stages]
        longest = max([config.sampling.max_response_tokens, *lengths])
        return adapter.make_engine(config, device=self._device, max_model_len=config.data.max_prompt_tokens + longest)

    async def sample(self, request: SampleRequest) -> Sample:
        assert self._engine is not None and self._capabilities is not None
        await self._gate.wait()
        self._running[request.request_id] = [(self._version, 0)]
        self._prompt_tokens[request.request_id] = len(request.prompt_token_ids)
        prompt = {"prompt_token_ids": request.prompt_token_ids, "cache_salt": str(self._version)}
        try:
            params = adapter.to_vllm(request.sampling, capabilities=self._capabilities)
            outputs = [output async for output in self._engine.generate(prompt, params, request.request_id)]
            if not outputs:
                raise RequestFailed(f"request {request.request_id} ended without an output")
            output = outputs[-1]
            return self._to_sample(adapter.read_output(output), self._running[request.request_id])
        except asyncio.CancelledError:
            raise
        except (RequestFailed, EngineFailed):
            raise
        except Exception as error:
            if self._engine.errored:
                raise EngineFailed(f"the engine died: {error or type(error).__name__}") from error
            raise RequestFailed(f"request {request.request_id}: {error or type(error).__name__}") from error
        finally:
            del self._running[request.request_id], self._prompt_tokens[request.request_id]

    def _to_sample(self, raw: adapter.RawSample, starts: list[tuple[int, int]]) -> Sample:
        spans = raw.spans
        if spans is None:
            ends = [start for _, start in starts[1:]] + [raw.token_ids.size]
            spans = [(version, end - start) for (version, start), end in zip(starts, ends, strict=True)]
        versions = np.repeat(
            np.asarray([version for version, _ in spans], dtype=np.int32), [length for _, length in spans]
        )
        return Sample(
            token_ids=raw.token_ids,
            logp_behaviour=raw.logp,
            versions=versions,
            finish_reason=raw.finish_reason,
            stop_reason=raw.stop_reason,
        )

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            await self._engine.abort(request_id)

    def progress(self) -> Mapping[str, int]:
        counts = adapter.token_counts(self._engine) if self._engine is not None else {}
        return {request_id: counts.get(request_id, 0) for request_id in self._running}

    def metrics(self) -> Mapping[str, float]:
        room = adapter.kv_tokens(self._engine) if self._engine is not None else 0
        if not room:
            return {}
        wanted = sum(self._prompt_tokens.get(request_id, 0) + count for request_id, count in self.progress().items())
        return {"generator/kv_demand": wanted / room}

    async def load_version(self, policy_version: int) -> float:
        assert self._engine is not None and self._capabilities is not None
        self._gate.clear()
        try:
            recompute = self.kv_on_update == "recompute" or not await self._all_have_a_token()
            started = time.monotonic()
            await self._engine.pause_generation(mode="keep", clear_cache=recompute)
            try:
                if not self._capabilities.weight_versions:
                    await adapter.drain_outputs(self._engine)
                for request_id, count in self.progress().items():
                    self._running[request_id].append((policy_version, count))
                await adapter.load_staged(self._engine, policy_version, capabilities=self._capabilities)
            except Exception as error:
                raise EngineFailed(f"loading version {policy_version} failed: {error}") from error
            if recompute and not self._running and not await self._engine.reset_prefix_cache():
                raise EngineFailed(f"the prefix cache was not reset for version {policy_version}")
            self._version = policy_version
            await self._engine.resume_generation()
            return time.monotonic() - started
        finally:
            self._gate.set()

    async def _all_have_a_token(self) -> bool:
        deadline = time.monotonic() + _FIRST_TOKEN_WAIT_S
        while any(count == 0 for count in self.progress().values()):
            if time.monotonic() > deadline:
                event(log, logging.INFO, "requests still wait for a first token: this update recomputes their caches")
                return False
            await asyncio.sleep(0.005)
        return True

    async def check_health(self) -> None:
        try:
            await self._engine.check_health()
        except Exception as error:
            raise EngineFailed(f"the engine is dead: {error or type(error).__name__}") from error

    def child_pids(self) -> list[int]:
        return adapter.engine_pids(self._engine) if self._engine is not None else []

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.get_running_loop().run_in_executor(self._starter, engine.shutdown)
        self._starter.shutdown(wait=False)


def _device(config: Config) -> str:
    if config.generators.device != "auto":
        return config.generators.device
    import torch

    return "cuda" if torch.cuda.device_count() > 0 else "cpu"
