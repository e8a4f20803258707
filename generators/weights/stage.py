"""Room for one whole version beside the weights in use: in device memory when there is enough, else on the host."""

from collections.abc import Sequence
from pathlib import Path

import torch

from learner.weights.buckets import BucketLayout, bucket_layout, check_buckets, unpack
from protocol.checksum import checksum
from protocol.messages import TensorSpec, WeightOffer

_DEVICE_RESERVE_BYTES = 1 << 30


class Stage:
    """Buffers of one version's buckets. Kept and reused as long as the layout stays the same.

    Lifecycle: `prepare(offer)` -> fill `buffer(i)` for every bucket -> `verify()` -> `tensors()` may be loaded.
    """

    def __init__(self, *, device: torch.device) -> None:
        self._device = device
        self._specs: Sequence[TensorSpec] = []
        self._layouts: list[BucketLayout] = []
        self._buffers: list[torch.Tensor] = []
        self._bounce: torch.Tensor | None = None

    def prepare(self, offer: WeightOffer, *, receive_on: torch.device) -> None:
        """Makes room for an offer, to be received into memory of `receive_on`.

        Raises:
            ValueError: the buckets do not cover the tensors. RuntimeError: out of memory.
        """
        check_buckets(offer.tensors, offer.buckets)
        layouts = [bucket_layout(offer.tensors, bucket) for bucket in offer.buckets]
        sizes = [layout.num_bytes for layout in layouts]
        place = self._choose_place(sum(sizes), receive_on)
        if [buffer.numel() for buffer in self._buffers] != sizes or any(b.device != place for b in self._buffers):
            self._buffers = []
            pin = place.type == "cpu" and self._device.type == "cuda"
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=place, pin_memory=pin) for size in sizes]
        self._bounce = None
        if place != receive_on:
            self._bounce = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=receive_on)
        self._layouts = layouts
        self._specs = offer.tensors

    def _choose_place(self, num_bytes: int, receive_on: torch.device) -> torch.device:
        if receive_on.type != "cuda":
            return torch.device("cpu")
        if sum(b.numel() for b in self._buffers if b.device.type == "cuda") >= num_bytes:
            return receive_on
        free, _ = torch.cuda.mem_get_info(receive_on)
        return receive_on if free > num_bytes + _DEVICE_RESERVE_BYTES else torch.device("cpu")

    @property
    def num_buckets(self) -> int:
        return len(self._layouts)

    def buffer(self, bucket: int) -> torch.Tensor:
        """Where to receive a bucket; call `received` afterwards."""
        if self._bounce is not None:
            return self._bounce[: self._layouts[bucket].num_bytes]
        return self._buffers[bucket]

    def received(self, bucket: int) -> None:
        """Moves a received bucket to its place, when it was received elsewhere."""
        if self._bounce is not None:
            self._buffers[bucket].copy_(self._bounce[: self._layouts[bucket].num_bytes])

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Views of all staged tensors, in the offer's order."""
        staged: list[tuple[str, torch.Tensor]] = []
        for layout, buffer in zip(self._layouts, self._buffers, strict=True):
            staged.extend(unpack(layout, self._specs, buffer))
        return staged

    def verify(self) -> None:
        """Compares every tensor's checksum with the offer's.

        Raises:
            ValueError: naming the tensors that differ.
        """
        by_name = {spec.name: spec for spec in self._specs}
        bad = [name for name, tensor in self.tensors() if checksum(tensor) != by_name[name].checksum]
        if bad:
            raise ValueError(
                f"{len(bad)} of {len(by_name)} tensors arrived with other bytes than offered: {', '.join(bad[:5])}"
            )

    def read_files(self, folder: Path) -> None:
        """Fills the stage from the safetensors files of a published folder (transport "file").

        Raises:
            ValueError: the folder or a tensor is missing, or has another size.
        """
        from safetensors import safe_open

        missing = {spec.name for spec in self._specs}
        staged = dict(self.tensors())
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    if name not in staged:
                        continue
                    tensor = file.get_tensor(name)
                    if tensor.shape != staged[name].shape or tensor.dtype != staged[name].dtype:
                        raise ValueError(f"{path.name}: {name} is {tensor.dtype} {tuple(tensor.shape)}, not as offered")
                    staged[name].copy_(tensor)
                    missing.discard(name)
        if missing:
            raise ValueError(f"{folder} lacks {len(missing)} offered tensors, such as {min(missing)}")
