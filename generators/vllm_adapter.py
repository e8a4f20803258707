"""All knowledge of vLLM's versions: engine arguments, sampling, output fields, pausing and reloading.

Known releases: 0.26 (GPUs) and 0.32 (CPUs and GPUs). `probe()` looks for every call the generator will need and says at
start what is missing, rather than hours later at the first weight update.

Imports of vLLM are inside the functions: this module is read by processes that may not have it.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import os
import tempfile
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from generators.backends.base import EngineFailed, RequestFailed
from protocol.config import Config
from protocol.messages import FinishReason, SamplingParams

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_MAX_SOCKET_FOLDER = 107 - len("/") - 36
TRANSFER_BACKEND = "slipstream"
_QUEUE_RECHECK_MS = 5
_NEEDED_CALLS = (
    "generate",
    "abort",
    "pause_generation",
    "resume_generation",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "reset_prefix_cache",
    "check_health",
)
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}


@dataclass(frozen=True)
class Capabilities:
    """What the installed vLLM can do."""

    version: str
    weight_versions: bool
    finish_takes_version: bool
    flat_logprobs: bool


def probe() -> Capabilities:
    """Checks the installed vLLM for every call that is needed later.

    Raises:
        EngineFailed: naming the release and each missing call.
    """
    import vllm
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.distributed import weight_transfer
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    missing = [f"AsyncLLM.{name}" for name in _NEEDED_CALLS if not hasattr(AsyncLLM, name)]
    pause = inspect.signature(AsyncLLM.pause_generation).parameters if not missing else {}
    missing += [f"pause_generation({name}=)" for name in ("mode", "clear_cache") if not missing and name not in pause]
    try:
        reload_functions()
    except ImportError as error:
        missing.append(f"layerwise reload ({error})")
    if not hasattr(weight_transfer, "WeightTransferEngineFactory"):
        missing.append("WeightTransferEngineFactory")
    if missing:
        raise EngineFailed(f"vLLM {vllm.__version__} lacks what weight updates need: {', '.join(missing)}")
    return Capabilities(
        version=vllm.__version__,
        weight_versions="weight_versions" in CompletionOutput.__dataclass_fields__,
        finish_takes_version="weight_version" in inspect.signature(AsyncLLM.finish_weight_update).parameters,
        flat_logprobs="flat_logprobs" in VllmSamplingParams.__struct_fields__,
    )


def reload_functions() -> tuple[Any, Any]:
    """(initialize(model), finalize(model, model_config)) of vLLM's layer-wise reload in checkpoint format."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    return initialize_layerwise_reload, finalize_layerwise_reload


def socket_folder(run_dir: Path, name: str) -> Path:
    """An empty folder of this generator's own for the engine's sockets; what an earlier start left there is removed.

    It lies in the run folder unless the paths would be too long for a Unix socket (107 bytes, 37 of them the name).
    """
    folder = run_dir / "state" / name
    if len(os.fsencode(folder)) > _MAX_SOCKET_FOLDER:
        digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"slipstream-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in folder.iterdir():
        if left.is_socket():
            left.unlink()
    return folder


def set_environment(*, device: str, num_threads: int, kv_cache_gb: int, sockets: Path) -> None:
    """Environment of the engine's processes. Must run before vLLM is imported."""
    os.environ["VLLM_RPC_BASE_PATH"] = str(sockets)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if device == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gb)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    else:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def wait_without_spinning() -> None:
    """Makes this process's later message queues wait for a notification instead of polling for a second first.

    Between steps vLLM's engine core polls for its worker, and the worker for the core. On CPUs that takes a core from
    whoever computes: the worker itself, or the trainer. Notifications may be lost (a PUB socket with room for one), so
    the queue is looked at every few milliseconds as well; vLLM's own interval is 5 s.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    queue: Any = shm_broadcast
    knows = "busy_loop_s" in inspect.signature(queue.SpinCondition.__init__).parameters
    if current_platform.is_cpu() and knows and hasattr(queue, "SHM_READER_RECHECK_INTERVAL_MS"):
        queue.SHM_READER_RECHECK_INTERVAL_MS = _QUEUE_RECHECK_MS
        queue.SpinCondition.__init__ = partialmethod(queue.SpinCondition.__init__, busy_loop_s=0.0)


def check_devices_free(*, num_devices: int, utilization: float) -> None:
    """Looks whether the engine's GPUs have the memory it will ask for; opens no CUDA context.

    Raises:
        EngineFailed: naming the device, and the processes that hold its memory.
    """
    try:
        import pynvml
    except ImportError:
        return
    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    indices = [int(part) for part in visible.split(",") if part.isdigit()] or list(range(num_devices))
    for index in indices[:num_devices]:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        if memory.free >= utilization * memory.total:
            continue
        holders = [
            f"pid {process.pid} ({(process.usedGpuMemory or 0) / 1e9:.1f} GB)"
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ]
        raise EngineFailed(
            f"GPU {index} has {memory.free / 1e9:.1f} of {memory.total / 1e9:.1f} GB free, and"
            f" generators.gpu_memory_utilization = {utilization:g} needs more;"
            f" held by {', '.join(holders) or 'processes that cannot be seen from here'}"
        )


def make_engine(config: Config, *, device: str, max_model_len: int) -> AsyncLLM:
    """Starts the engine in processes of its own (blocking; tens of seconds).

    Nothing of the model folder's generation_config is used; recorded log-probs are those of the sampling distribution.
    """
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    generators = config.generators
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "tokenizer": config.model.tokenizer_path or config.model.path,
        "dtype": config.model.dtype,
        "load_format": generators.load_format,
        "seed": config.run.seed,
        "max_model_len": max_model_len,
        "max_num_seqs": generators.max_num_seqs,
        "max_num_batched_tokens": generators.max_num_batched_tokens,
        "tensor_parallel_size": generators.tensor_parallel_size,
        "enforce_eager": generators.enforce_eager or device == "cpu",
        "enable_prefix_caching": generators.enable_prefix_caching,
        "enable_chunked_prefill": generators.enable_chunked_prefill,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "weight_transfer_config": WeightTransferConfig(backend=TRANSFER_BACKEND),
        "disable_log_stats": True,
    }
    if device != "cpu":
        check_devices_free(num_devices=generators.tensor_parallel_size, utilization=generators.gpu_memory_utilization)
        arguments["gpu_memory_utilization"] = generators.gpu_memory_utilization
    if generators.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    arguments.update(generators.engine_args)
    known = AsyncEngineArgs.__dataclass_fields__
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise EngineFailed(f"generators.engine_args: this vLLM has no argument named {', '.join(unknown)}")
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def to_vllm(sampling: SamplingParams, *, capabilities: Capabilities) -> VllmSamplingParams:
    """Every parameter explicit; only the final output is sent, with the log-prob of each sampled token.

    End-of-sequence ids are stops only because the lease lists them: the folder's own are ignored.
    """
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    extra: dict[str, Any] = {"flat_logprobs": True} if capabilities.flat_logprobs else {}
    return VllmSamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop),
        ignore_eos=True,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        logprobs=0,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        **extra,
    )


@dataclass(frozen=True)
class RawSample:
    """Fields of a finished vLLM output; `spans` is None where this release does not label tokens."""

    token_ids: np.ndarray
    logp: np.ndarray
    finish_reason: FinishReason
    stop_reason: str
    spans: list[tuple[int, int]] | None


def read_output(output: RequestOutput) -> RawSample:
    """Reads the one completion of a final output.

    Raises:
        RequestFailed: the engine ended it with an error, or log-probs are missing.
    """
    completion = output.outputs[0]
    reason = _FINISH_REASONS.get(completion.finish_reason or "")
    if reason is None:
        raise RequestFailed(f"request {output.request_id} ended with {completion.finish_reason!r}")
    token_ids = np.asarray(completion.token_ids, dtype=np.int32)
    spans = getattr(completion, "weight_versions", None)
    return RawSample(
        token_ids=token_ids,
        logp=_sampled_logprobs(completion.logprobs, token_ids, output.request_id),
        finish_reason=reason,
        stop_reason="" if completion.stop_reason is None else str(completion.stop_reason),
        spans=None if spans is None else [(int(span.version), span.end - span.start) for span in spans],
    )


def _sampled_logprobs(logprobs: Any, token_ids: np.ndarray, request_id: str) -> np.ndarray:
    if token_ids.size == 0:
        return np.zeros(0, dtype=np.float32)
    if logprobs is None or len(logprobs) != token_ids.size:
        raise RequestFailed(f"request {request_id}: {token_ids.size} tokens but log-probs are missing")
    if hasattr(logprobs, "start_indices"):
        first = np.asarray(logprobs.start_indices)
        if not np.array_equal(np.asarray(logprobs.token_ids)[first], token_ids):
            raise RequestFailed(f"request {request_id}: log-probs belong to other tokens")
        return np.asarray(logprobs.logprobs, dtype=np.float32)[first]
    return np.asarray(
        [position[token].logprob for position, token in zip(logprobs, token_ids.tolist(), strict=True)],
        dtype=np.float32,
    )


def token_counts(engine: AsyncLLM) -> dict[str, int]:
    """Tokens sampled so far per request id (ours, not the engine's inner one)."""
    counts = {}
    for state in engine.output_processor.request_states.values():
        request_id = getattr(state, "external_req_id", None) or state.request_id
        counts[request_id] = state.detokenizer.num_output_tokens() if state.detokenizer is not None else 0
    return counts


def kv_tokens(engine: AsyncLLM) -> int:
    """Tokens whose keys and values the cache holds at most; 0 where this release does not say."""
    cache = engine.vllm_config.cache_config
    return (cache.num_gpu_blocks or 0) * (cache.block_size or 0)


async def drain_outputs(engine: AsyncLLM) -> None:
    """Waits until every token of a paused engine has been counted: its outputs are handled by a task of their own."""
    queue: Any = getattr(engine.engine_core, "outputs_queue", None)
    num_quiet, before = 0, -1
    while num_quiet < 3:
        await asyncio.sleep(0.001)
        now = sum(token_counts(engine).values())
        quiet = now == before and (queue is None or queue.empty())
        num_quiet, before = (num_quiet + 1 if quiet else 0), now


async def set_version_label(engine: AsyncLLM, policy_version: int, *, capabilities: Capabilities) -> None:
    """Labels tokens sampled from here on, where the release has labels. Call only while paused or idle."""
    if capabilities.finish_takes_version:
        await engine.update_weight_version(str(policy_version))


async def load_staged(engine: AsyncLLM, policy_version: int, *, capabilities: Capabilities) -> None:
    """Loads a staged version in all workers; the engine must be paused."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await engine.start_weight_update()
    await engine.update_weights(WeightTransferUpdateRequest(update_info={"policy_version": policy_version}))
    await engine.finish_weight_update()
    await set_version_label(engine, policy_version, capabilities=capabilities)


def refresh_heads(model: torch.nn.Module) -> None:
    """Rebuilds what the output layer derives from its weight (on CPUs a repacked copy).

    vLLM's layer-wise reload does so only for layers that a tensor was loaded into; a tied head shares the embedding's
    weight, gets none, and would go on with its repacked copy of the old one.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            process: Any = getattr(module.quant_method, "process_weights_after_loading", None)
            if process is not None:
                process(module)


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Lets the next load pack the experts of a mixture again; call it before a reload on CPUs.

    vLLM's CPU kernels hold experts in a packed layout, which `process_weights_after_loading` makes only while the layer
    has no kernel yet; a reload would leave unpacked values in the packed storage, and samples from neither policy.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def mask_vocabulary(model: torch.nn.Module, num_tokens: int) -> None:
    """Makes ids >= num_tokens impossible: their logits become -inf wherever the model's head is wider (in place)."""
    compute_logits: Any = model.compute_logits

    def masked(*args: Any, **kwargs: Any) -> Any:
        logits = compute_logits(*args, **kwargs)
        if logits is not None and logits.shape[-1] > num_tokens:
            logits[..., num_tokens:] = float("-inf")
        return logits

    model.compute_logits = masked  # type: ignore[assignment]


def engine_pids(engine: AsyncLLM) -> list[int]:
    """Processes of the engine: all children of this process that vLLM started."""
    import psutil

    manager = getattr(engine.engine_core, "resources", None)
    processes = getattr(getattr(manager, "engine_manager", None), "processes", [])
    found: list[int] = []
    for process in processes:
        if process.pid is not None and psutil.pid_exists(process.pid):
            found.append(process.pid)
            found.extend(child.pid for child in psutil.Process(process.pid).children(recursive=True))
    return found
