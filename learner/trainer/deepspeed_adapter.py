"""The only module that knows DeepSpeed: one model under ZeRO-3, its optimizer, and exact access to its shards.

Shards are read and written through ZeRO's own flat partitions and one collective of ours per bucket, sized by
``ds_numel``: between steps they are the truth, and no hook, trace or persistence state of ZeRO takes part. Rank r of N
holds elements [r * ceil(n / N), ...) of each flattened parameter, padded at the end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from protocol.config.learner import LearnerSection, ZeroSection

StateKind = Literal["model", "master", "exp_avg", "exp_avg_sq"]
OPTIMIZER_STATES: tuple[StateKind, ...] = ("exp_avg", "exp_avg_sq")
GATHER_BUCKET_ELEMENTS = 64_000_000


@dataclass(frozen=True)
class StepOutcome:
    """An optimizer step: ``applied`` is False when a gradient was not finite; ``grad_norm`` is before clipping."""

    applied: bool
    grad_norm: float

    @classmethod
    def nothing(cls) -> StepOutcome:
        """Of a step without a token to train."""
        return cls(applied=False, grad_norm=0.0)


def init_distributed(*, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> None:
    """Joins the default process group (Gloo on CPUs, NCCL on GPUs); a no-op when there is one already.

    With several ranks the rendezvous is MASTER_ADDR and MASTER_PORT of the environment.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    else:
        torch.cuda.set_device(device)
    os.environ.setdefault("LOCAL_RANK", str(rank))  # DeepSpeed asserts that it is set
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if num_ranks == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, rank=rank, world_size=num_ranks, timeout=timeout)


class ZeroEngine:
    """One model, sharded over the default group by ZeRO-3, with AdamW on float32 master weights.

    The optimizer is torch's fused AdamW on CPUs and GPUs alike: on ZeRO's flat partitions it is one kernel, and it
    needs no compiler at start-up.
    """

    def __init__(self, model: nn.Module, *, learner: LearnerSection, dtype: torch.dtype, device: torch.device) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu" if device.type == "cpu" else "cuda")
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        deepspeed.init_distributed(dist_backend="gloo" if device.type == "cpu" else "nccl", dist_init_required=False)
        self.device = device
        self.dtype = dtype
        optim = learner.optim
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.shapes: dict[str, torch.Size] = {name: p.shape for name, p in named}
        optimizer = torch.optim.AdamW(
            [p for _, p in named],
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        num_elements = sum(p.numel() for _, p in named)
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=_deepspeed_config(learner, dtype=dtype, device=device, num_elements=num_elements),
            dist_init_required=False,
        )
        self._zero: Any = self._engine.optimizer
        self._parameters: dict[str, Any] = {n: p for n, p in self._engine.module.named_parameters() if n in self.shapes}
        self.num_ranks = dist.get_world_size()
        self.rank = dist.get_rank()

    @property
    def module(self) -> nn.Module:
        return self._engine.module

    def __call__(self, *args: Any) -> Any:
        return self._engine(*args)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Accumulates gradients; ZeRO averages them over ranks, so give the rank's share times the number of ranks."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss)

    def step(self, *, lr: float) -> StepOutcome:
        """Clips and applies the accumulated gradients, or drops them on all ranks when their norm is not finite."""
        self._zero.set_lr(lr)
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.step()
        applied = bool(self._engine.was_step_applied())
        norm = self._engine.get_global_grad_norm()
        return StepOutcome(applied=applied, grad_norm=float(norm) if applied and norm is not None else float("inf"))

    @property
    def num_steps(self) -> int:
        """Optimizer steps applied since the moments were zero."""
        states = self._zero.optimizer.state
        steps = {int(s["step"]) for flat in self._zero.fp32_partitioned_groups_flat if (s := states.get(flat))}
        assert len(steps) <= 1, steps
        return steps.pop() if steps else 0

    def gather(self, kind: StateKind, *, copy: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(name, whole tensor)`` in the model's order on rank 0, nothing elsewhere; all ranks must exhaust it.

        "model" is in the computing type, the others float32. Tensors are the receiver's own, on the engine's device;
        without ``copy`` they may be the live state itself, to be read before the next one is asked for. Raises
        ValueError when a tensor's shape is not the model's.
        """
        bucket: list[str] = []
        elements = 0
        for name in self._parameters:
            bucket.append(name)
            elements += self._parameters[name].ds_numel
            if elements >= GATHER_BUCKET_ELEMENTS:
                yield from self._gather_bucket(bucket, kind, copy=copy)
                bucket, elements = [], 0
        if bucket:
            yield from self._gather_bucket(bucket, kind, copy=copy)

    def _gather_bucket(self, names: list[str], kind: StateKind, *, copy: bool) -> Iterator[tuple[str, torch.Tensor]]:
        parts = [self._shard(name, kind).detach().reshape(-1) for name in names]
        if self.num_ranks == 1:
            for name, part in zip(names, parts, strict=True):
                whole = self._whole(name, part)
                yield name, whole.to(self.device, copy=True) if copy else whole
            return
        local = torch.cat(parts).to(self.device)
        gathered = torch.empty(self.num_ranks, local.numel(), dtype=local.dtype, device=self.device)
        dist.all_gather_into_tensor(gathered.view(-1), local)
        if self.rank != 0:
            return
        offset = 0
        for name, part in zip(names, parts, strict=True):
            whole = self._whole(name, gathered[:, offset : offset + part.numel()].reshape(-1))
            yield name, whole.clone() if copy else whole
            offset += part.numel()

    def _whole(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        param = self._parameters[name]
        if flat.numel() < param.ds_numel or tuple(param.ds_shape) != tuple(self.shapes[name]):
            raise ValueError(
                f"{name}: gathered {flat.numel()} elements of shape {tuple(param.ds_shape)}, "
                f"the model's is {tuple(self.shapes[name])}: not exported"
            )
        return flat[: param.ds_numel].view(self.shapes[name])

    def load(self, read: Callable[[str, StateKind], torch.Tensor], *, num_steps: int) -> None:
        """Replaces master weights, moments and step count; ``read(name, kind)`` gives whole float32 tensors.

        Every rank keeps its own part, whatever the number of ranks that wrote them. With ``num_steps`` = 0 there are
        no moments to read.
        """
        states = self._zero.optimizer.state
        flats = self._zero.fp32_partitioned_groups_flat
        for flat in flats:
            states.pop(flat, None)
            if num_steps:
                step = torch.tensor(float(num_steps), dtype=torch.float32, device=flat.device)
                states[flat] = {"step": step} | {str(k): torch.zeros_like(flat.detach()) for k in OPTIMIZER_STATES}
        kinds: tuple[StateKind, ...] = ("master", *OPTIMIZER_STATES) if num_steps else ("master",)
        for name in self._parameters:
            for kind in kinds:
                self._write_shard(name, kind, read(name, kind))
        for group in range(len(flats)):
            self._zero._reassign_or_swap_out_partitioned_parameters(group)
        persistent = self._zero.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)

    def _shard(self, name: str, kind: StateKind) -> torch.Tensor:
        param = self._parameters[name]
        if kind == "model":
            return param.ds_tensor
        group, offset, length = self._zero.grad_position[self._zero.get_param_id(param)]
        flat = self._zero.fp32_partitioned_groups_flat[group]
        if kind != "master":
            flat = self._zero.optimizer.state[flat][kind]
        return flat.narrow(0, offset, length)

    def _write_shard(self, name: str, kind: StateKind, value: torch.Tensor) -> None:
        shard = self._shard(name, kind)
        if value.shape != self.shapes[name]:
            raise ValueError(
                f"{kind} of {name} has shape {tuple(value.shape)}, the model's is {tuple(self.shapes[name])}"
            )
        start = min(self.rank * shard.numel(), value.numel())
        own = value.reshape(-1)[start : start + shard.numel()]
        shard.data.zero_()
        shard.data[: own.numel()].copy_(own)

    def destroy(self) -> None:
        """Frees hooks and buffers."""
        self._engine.destroy()


class FrozenEngine:
    """A model that is only run, sharded by ZeRO-3 over the ranks when there are several; all ranks call it together."""

    def __init__(self, model: nn.Module, *, learner: LearnerSection, dtype: torch.dtype, device: torch.device) -> None:
        self.module: Any = model.requires_grad_(False)
        if dist.get_world_size() == 1:
            self._run: Any = model.to(device)
            return
        import deepspeed

        num_elements = sum(p.numel() for p in model.parameters())
        config = _deepspeed_config(learner, dtype=dtype, device=device, num_elements=num_elements)
        self._run, *_ = deepspeed.initialize(model=model, config=dict(config), dist_init_required=False)

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)


def _deepspeed_config(
    learner: LearnerSection, *, dtype: torch.dtype, device: torch.device, num_elements: int
) -> Mapping[str, Any]:
    zero: ZeroSection = learner.zero
    alone = dist.get_world_size() == 1  # nothing is sharded: gathering and releasing would only copy
    on_gpu = device.type == "cuda"
    section: dict[str, Any] = {
        "stage": 3,
        "contiguous_gradients": True,
        "overlap_comm": on_gpu,
        "reduce_scatter": on_gpu,
        "reduce_bucket_size": min(zero.reduce_bucket_elements, num_elements),
        "stage3_prefetch_bucket_size": min(zero.prefetch_bucket_elements, num_elements),
        "stage3_param_persistence_threshold": num_elements if alone else zero.persistence_threshold_elements,
        "stage3_max_live_parameters": zero.max_live_elements,
        "stage3_max_reuse_distance": zero.max_live_elements,
    }
    if zero.offload_optimizer == "cpu":
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    if zero.offload_param == "cpu":
        section["offload_param"] = {"device": "cpu", "pin_memory": on_gpu}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": learner.optim.grad_clip,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": section,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
