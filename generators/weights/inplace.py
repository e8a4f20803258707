"""Loading a version by copying straight into the model's parameters, with one fused launch per kind of tensor.

vLLM's layer-wise reload walks every parameter in Python, for hundreds of them, on each update. Where nothing is
derived from the weights (no quantization, no repacking), all a load does in the end is copy slices of the offered
tensors into slices of parameters. A plan is the list of those copies, recorded once while the model's own loaders run
and proved before it is used: with every parameter wiped, the copies must bring back each one's bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protocol.checksum import checksum

Named = Sequence[tuple[str, torch.Tensor]]
Layout = frozenset[tuple[str, torch.dtype, torch.Size]]
_SIMPLE_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}


@dataclass(frozen=True)
class Copy:
    """One copy: a strided view of an offered tensor into a view of a parameter."""

    target: torch.Tensor
    source: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class CopyPlan:
    """Copies that load any version whose tensors have these names, shapes and types, in whatever order."""

    layout: Layout
    copies: tuple[Copy, ...]

    def fits(self, tensors: Named) -> bool:
        """Whether the offered tensors are those the plan was made from, values aside."""
        return self.layout == layout_of(tensors)

    def load(self, tensors: Named) -> None:
        """Copies everything; the calling stream's later work sees the new values."""
        offered = dict(tensors)
        targets = [copy.target for copy in self.copies]
        sources = [
            offered[copy.source].as_strided(copy.size, copy.stride, offered[copy.source].storage_offset() + copy.offset)
            for copy in self.copies
        ]
        with torch.no_grad():
            torch._foreach_copy_(targets, sources, non_blocking=True)


def is_simple(model: torch.nn.Module) -> bool:
    """Whether the model keeps its weights as loaded: no quantized, fused-expert or latent-attention layers."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in _SIMPLE_METHODS and _has_parameters(module):
            return False
        if "MLA" in type(module).__name__ or "FusedMoE" in type(module).__name__:
            return False
    return True


def prove_plan(model: torch.nn.Module, tensors: Named, load: Callable[[Named], Any]) -> CopyPlan | None:
    """Records what `load` copies and proves it; the model must hold these tensors already, and holds them afterwards.

    Args:
        load: the model's own loader; it may write to parameters only.

    Returns:
        The plan, or None when the loader does more than copy (the caller then has to load the ordinary way again).
    """
    parameters = list({id(p): p for p in model.parameters()}.values())
    before = [checksum(parameter.detach()) for parameter in parameters]
    with torch.no_grad(), _Recorder() as recorder:
        load(tensors)
    copies = _resolve(recorder.copies, tensors)
    if copies is None:
        return None
    plan = CopyPlan(layout=layout_of(tensors), copies=tuple(copies))
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    plan.load(tensors)
    after = [checksum(parameter.detach()) for parameter in parameters]
    return plan if after == before else None


class _Recorder(TorchDispatchMode):
    """Notes every in-place copy between tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def _resolve(recorded: list[tuple[torch.Tensor, torch.Tensor]], tensors: Named) -> list[Copy] | None:
    """Expresses each copy's source as a view of an offered tensor; None where one is not."""
    order = sorted(range(len(tensors)), key=lambda index: tensors[index][1].data_ptr())
    starts = [tensors[index][1].data_ptr() for index in order]
    copies = []
    for target, source in recorded:
        place = bisect_right(starts, source.data_ptr()) - 1
        if place < 0:
            return None
        name, offered = tensors[order[place]]
        distance = source.data_ptr() - offered.data_ptr()
        num_bytes = offered.numel() * offered.element_size()
        if source.dtype != offered.dtype or source.device != offered.device or distance >= max(1, num_bytes):
            return None
        copies.append(
            Copy(
                target=target.detach(),
                source=name,
                size=tuple(source.shape),
                stride=tuple(source.stride()),
                offset=distance // source.element_size(),
            )
        )
        if source.shape != target.shape:
            return None
    return copies


def layout_of(tensors: Named) -> Layout:
    """Names, types and shapes of offered tensors."""
    return frozenset((name, tensor.dtype, tensor.shape) for name, tensor in tensors)


def _has_parameters(module: torch.nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None
