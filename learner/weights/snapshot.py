"""A whole policy version, frozen at a step boundary: what the publisher sends and nothing else."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from protocol.checksum import checksum
from protocol.messages import TensorSpec


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16", as it travels in a `TensorSpec`."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """Inverse of `dtype_name`.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r} in a tensor's description")
    return dtype


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """This process's stream for weights on a GPU. One for all: PyTorch keeps freed memory apart for every stream."""
    return torch.cuda.Stream(device)


@dataclass
class Snapshot:
    """Tensors of one policy version under their Hugging Face names: contiguous, all on one device, in a fixed order.

    Nobody writes to the tensors while the publisher holds the snapshot; the trainer fills another one meanwhile.
    Tied tensors appear once, under the name the checkpoint uses.
    """

    policy_version: int
    tensors: list[tuple[str, torch.Tensor]]
    _specs: list[TensorSpec] | None = field(default=None, repr=False, compare=False)
    _written: torch.cuda.Event | None = field(default=None, repr=False, compare=False)

    def mark_written(self) -> None:
        """On a GPU: what was queued so far on the caller's stream completes the tensors (see `reading`)."""
        if self.tensors and self.tensors[0][1].device.type == "cuda":
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(self.tensors[0][1].device))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """On a GPU: a stream for this thread that reads the whole tensors without waiting for the training step."""
        if self._written is None:
            yield
            return
        device = self.tensors[0][1].device
        with torch.cuda.device(device), torch.cuda.stream(side_stream(device)):
            torch.cuda.current_stream(device).wait_event(self._written)
            yield
            torch.cuda.current_stream(device).synchronize()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors)

    def specs(self) -> list[TensorSpec]:
        """Name, dtype, shape and checksum of every tensor, in sending order (computed once: one pass over the bytes).

        Raises:
            ValueError: a name appears twice, a tensor is not contiguous, or tensors are on different devices.
        """
        if self._specs is None:
            self._check()
            self._specs = [
                TensorSpec(
                    name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), checksum=checksum(tensor)
                )
                for name, tensor in self.tensors
            ]
        return self._specs

    def _check(self) -> None:
        names = [name for name, _ in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"a snapshot holds tensors twice: {', '.join(twice)}")
        for name, tensor in self.tensors:
            if not tensor.is_contiguous():
                raise ValueError(f"tensor {name} of a snapshot is not contiguous: call .contiguous() when gathering")
        devices = {str(tensor.device) for _, tensor in self.tensors}
        if len(devices) > 1:
            raise ValueError(f"a snapshot's tensors are on several devices ({', '.join(sorted(devices))}): use one")
