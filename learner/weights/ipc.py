"""CUDA IPC between trainer and engine workers on one GPU, where NCCL refuses two ranks on a device.

Rank 0 owns one shared buffer; its handle goes through the epoch's store. Per bucket n, on store keys:

    rank 0:  copies the bucket into the buffer, sets ready/n = "handle number:bytes", waits for done/n/* of all others
    others:  wait for ready/n, copy out of the buffer, set done/n/rank

Handles travel as MessagePack (plain numbers and bytes), so nothing received is unpickled.
"""

import base64
import time
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from learner.weights.transports import TransportFailed

_SLICE_S = 1.0


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
        if self._shared is None or self._shared.numel() < num_bytes:
            self._shared = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            self._handle_number += 1
            self._store.set(f"handle/{self._handle_number}", _encode(self._shared))
        self._shared[:num_bytes].copy_(buffer)
        torch.cuda.synchronize(self.device)
        self._store.set(f"ready/{self._sequence}", f"{self._handle_number}:{num_bytes}")
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
        torch.cuda.synchronize(self.device)
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
