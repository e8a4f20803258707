"""CUDA IPC between trainer and engine workers on one GPU, where NCCL refuses two ranks on a device.

Rank 0 owns one shared buffer; its handle goes through the epoch's store. Per bucket n, on store keys:

    rank 0:  copies the bucket into the buffer, sets ready/n = "handle number:bytes", waits for done/n/* of all others
    others:  wait for ready/n, copy out of the buffer, set done/n/rank

Handles travel as MessagePack (plain numbers and bytes), so nothing received is unpickled. The buffer belongs to the
process and serves every epoch: memory that a killed receiver had opened is never given back by PyTorch, so a buffer
per epoch would be lost with each such death.
"""

import base64
import threading
import time
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from learner.weights.transports import TransportFailed

_SLICE_S = 1.0


class _SharedBuffer:
    """The sending process's buffer on one device, grown when a larger bucket comes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensor: torch.Tensor | None = None
        self._handle = ""
        self.lock = threading.Lock()
        self.number = 0

    def reserve(self, num_bytes: int) -> tuple[torch.Tensor, str]:
        """The whole buffer, at least `num_bytes` long, and its handle."""
        if self._tensor is None or self._tensor.numel() < num_bytes:
            self._tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._handle = _encode(self._tensor)
            self.number += 1
        return self._tensor, self._handle


_buffers: dict[str, _SharedBuffer] = {}


def _shared_buffer(device: torch.device) -> _SharedBuffer:
    return _buffers.setdefault(str(device), _SharedBuffer(device))


class IpcCommunicator:
    """Same-device copies, announced through the store."""

    def __init__(self, store: dist.TCPStore, *, rank: int, world_size: int, device: torch.device) -> None:
        self.device = device
        self._store = store
        self._rank = rank
        self._others = [other for other in range(world_size) if other != 0]
        self._shared: torch.Tensor | None = None
        self._handle_number = 0
        self._sequence = 0
        self._aborted = False

    def broadcast(self, buffer: torch.Tensor, *, deadline: float) -> None:
        self._sequence += 1
        with torch.cuda.device(self.device):
            if self._rank == 0:
                self._send(buffer, deadline)
            else:
                self._receive(buffer, deadline)

    def _send(self, buffer: torch.Tensor, deadline: float) -> None:
        num_bytes = buffer.numel()
        own = _shared_buffer(self.device)
        with own.lock:
            shared, handle = own.reserve(num_bytes)
            if own.number != self._handle_number:
                self._handle_number = own.number
                self._store.set(f"handle/{own.number}", handle)
            shared[:num_bytes].copy_(buffer)
            torch.cuda.current_stream(self.device).synchronize()
            self._store.set(f"ready/{self._sequence}", f"{own.number}:{num_bytes}")
            done = [f"done/{self._sequence}/{other}" for other in self._others]
            self._wait(done, deadline)
        for key in (*done, f"ready/{self._sequence}"):
            self._store.delete_key(key)

    def _receive(self, buffer: torch.Tensor, deadline: float) -> None:
        key = f"ready/{self._sequence}"
        self._wait([key], deadline)
        number, num_bytes = map(int, self._store.get(key).decode().split(":"))
        if num_bytes != buffer.numel():
            raise TransportFailed(f"a bucket of {num_bytes} bytes came where {buffer.numel()} were expected")
        if self._shared is None or number != self._handle_number:
            self._shared = _decode(self._store.get(f"handle/{number}").decode())
            self._handle_number = number
        buffer.copy_(self._shared[:num_bytes])
        torch.cuda.current_stream(self.device).synchronize()
        self._store.set(f"done/{self._sequence}/{self._rank}", "1")

    def _wait(self, keys: list[str], deadline: float) -> None:
        while not self._aborted:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TransportFailed("a member of the weight group did not take its data by the deadline")
            try:
                self._store.wait(keys, timedelta(seconds=min(_SLICE_S, remaining)))
                return
            except dist.DistStoreError:
                continue
            except RuntimeError as error:
                raise TransportFailed(f"the weight group's store is gone: {error}") from error
        raise TransportFailed("the weight group was aborted")

    def abort(self) -> None:
        self._aborted = True


def _encode(buffer: torch.Tensor) -> str:
    storage: Any = buffer.untyped_storage()
    return base64.b64encode(msgspec.msgpack.encode(list(storage._share_cuda_()))).decode()


def _decode(text: str) -> torch.Tensor:
    parts = msgspec.msgpack.decode(base64.b64decode(text))
    make: Any = torch.UntypedStorage
    storage = make._new_shared_cuda(*parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
