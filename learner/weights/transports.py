"""One-to-all transports of byte buffers between the publisher (rank 0) and the engines' workers.

A communicator lives for one epoch of the weight group. It is built directly on a TCPStore of that epoch, never as a
default process group, so trainer and engine keep their own. Every call ends at its deadline; after an error the
communicator is useless and a new epoch must be formed.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

GROUP_TRANSPORTS = ("nccl", "ipc", "gloo")


class TransportFailed(RuntimeError):
    """A collective or the rendezvous failed or ran out of time; the reason is one line."""


class Communicator(Protocol):
    """Broadcast from rank 0 to all others."""

    @property
    def device(self) -> torch.device:
        """Where buffers passed to `broadcast` must live."""

    def broadcast(self, buffer: torch.Tensor, *, deadline: float) -> None:
        """Sends (rank 0) or fills (others) a uint8 buffer. `deadline` is on the monotonic clock.

        Raises:
            TransportFailed: a member is gone or too slow.
        """

    def abort(self) -> None:
        """Frees the communicator; a call blocked in another thread fails soon. Safe to call twice."""


def open_store(host: str, *, deadline_s: float) -> dist.TCPStore:
    """The rendezvous store of an epoch, listening on `host` only, at a free port (`store.port`)."""
    listener = socket.create_server((host, 0), family=_family(host), backlog=128)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=deadline_s),
        master_listen_fd=listener.detach(),
    )


def connect(
    transport: str,
    *,
    store_host: str,
    store_port: int,
    rank: int,
    world_size: int,
    deadline_s: float,
    device: torch.device | None = None,
    store: dist.TCPStore | None = None,
) -> Communicator:
    """Joins an epoch's group; returns once all members are there.

    Args:
        device: this member's device (nccl and ipc); gloo stages through the host.
        store: the publisher passes the store it opened.

    Raises:
        TransportFailed: not all members came by the deadline, or the transport is unknown.
    """
    deadline = time.monotonic() + deadline_s
    try:
        store = store or dist.TCPStore(
            store_host, store_port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=deadline_s)
        )
        _meet(store, rank=rank, world_size=world_size, deadline=deadline)
        remaining = max(1.0, deadline - time.monotonic())
        if transport == "gloo":
            return GlooCommunicator(store, rank=rank, world_size=world_size, deadline_s=remaining, host=store_host)
        if transport == "nccl":
            assert device is not None, "nccl needs a device"
            return NcclCommunicator(store, rank=rank, world_size=world_size, deadline_s=remaining, device=device)
        if transport == "ipc":
            from learner.weights.ipc import IpcCommunicator

            assert device is not None, "ipc needs a device"
            return IpcCommunicator(store, rank=rank, world_size=world_size, device=device)
    except (RuntimeError, OSError) as error:
        raise TransportFailed(f"rank {rank} of {world_size} could not join over {transport}: {_line(error)}") from error
    raise TransportFailed(f"unknown weight transport {transport!r}: use one of {', '.join(GROUP_TRANSPORTS)}")


def _meet(store: dist.TCPStore, *, rank: int, world_size: int, deadline: float) -> None:
    """All members say they are there before any of them enters a rendezvous that cannot be left early."""
    store.set(f"here/{rank}", "1")
    keys = [f"here/{other}" for other in range(world_size)]
    store.wait(keys, timedelta(seconds=max(0.001, deadline - time.monotonic())))


class GlooCommunicator:
    """Gloo between host buffers; each member listens on the address that reaches the store."""

    def __init__(self, store: dist.TCPStore, *, rank: int, world_size: int, deadline_s: float, host: str) -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=deadline_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_local_address(host))]
        options._threads = 1
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world_size, options)
        self._store = store
        self.device = torch.device("cpu")

    def broadcast(self, buffer: torch.Tensor, *, deadline: float) -> None:
        group = self._group
        if group is None:
            raise TransportFailed("the weight group was aborted")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            group.broadcast([buffer], options).wait()
        except RuntimeError as error:
            raise TransportFailed(f"gloo broadcast failed: {_line(error)}") from error

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class NcclCommunicator:
    """NCCL between device buffers on a stream of its own; a blocked call is ended by aborting the communicator."""

    def __init__(
        self, store: dist.TCPStore, *, rank: int, world_size: int, deadline_s: float, device: torch.device
    ) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=deadline_s)
        self._group: Any = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, world_size, options)
        self._store = store
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), deadline=time.monotonic() + deadline_s)

    def broadcast(self, buffer: torch.Tensor, *, deadline: float) -> None:
        group = self._group
        if group is None:
            raise TransportFailed("the weight group was aborted")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
                work = group.broadcast([buffer], options)
                work.block_current_stream() if hasattr(work, "block_current_stream") else work.synchronize()
                done = torch.cuda.Event()
                done.record(self._stream)
            _wait_event(done, deadline)
        except TransportFailed:
            self.abort()
            raise
        except RuntimeError as error:
            raise TransportFailed(f"nccl broadcast failed: {_line(error)}") from error

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def _wait_event(event: torch.cuda.Event, deadline: float) -> None:
    """Waits for a device event without blocking in the driver, so that the deadline holds when a peer is gone."""
    pause = 0.0002
    while not event.query():
        if time.monotonic() > deadline:
            raise TransportFailed("a member of the weight group did not take its data by the deadline")
        time.sleep(pause)
        pause = min(0.005, pause * 2)


def _local_address(host: str) -> str:
    """This machine's address on the route to `host` (loopback stays loopback)."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None)[0][0]


def _line(error: BaseException) -> str:
    text = str(error).split(" This is typically caused", 1)[0].strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
