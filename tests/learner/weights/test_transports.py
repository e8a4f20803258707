"""Communicators between real processes: bytes arrive, and no call outlives its deadline."""

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch

from learner.weights.transports import TransportFailed, connect, open_store

SIZES = (1, 4096, 3_000_000)


def _device(transport: str, rank: int) -> torch.device:
    if transport == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", 0 if transport == "ipc" else rank)


def _receive(transport: str, port: int, rank: int, world_size: int, die: int, results: Any) -> None:
    torch.set_num_threads(1)
    device = _device(transport, rank)
    communicator = connect(
        transport,
        store_host="127.0.0.1",
        store_port=port,
        rank=rank,
        world_size=world_size,
        deadline_s=60.0,
        device=device,
    )
    for size in SIZES:
        buffer = torch.zeros(size, dtype=torch.uint8, device=communicator.device)
        communicator.broadcast(buffer, deadline=time.monotonic() + 60.0)
        results.put((rank, size, int(buffer.long().sum().item())))
    results.close()
    results.join_thread()
    os.kill(os.getpid(), die)


def _has(transport: str) -> bool:
    return transport == "gloo" or torch.cuda.device_count() >= (1 if transport == "ipc" else 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("transport", ["gloo", "nccl", "ipc"])
def test_b44_bytes_arrive_and_a_lost_member_frees_the_sender_by_the_deadline(transport: str, number: int) -> None:
    if not _has(transport):
        pytest.skip(f"{transport} needs GPUs: {torch.cuda.device_count()} here")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = open_store("127.0.0.1", deadline_s=60.0)
    process = context.Process(target=_receive, args=(transport, store.port, 1, 2, int(number), results))
    process.start()
    try:
        communicator = connect(
            transport,
            store_host="127.0.0.1",
            store_port=store.port,
            rank=0,
            world_size=2,
            deadline_s=60.0,
            device=_device(transport, 0),
            store=store,
        )
        for size in SIZES:
            buffer = (torch.arange(size) % 251).to(torch.uint8).to(communicator.device)
            communicator.broadcast(buffer, deadline=time.monotonic() + 60.0)
            assert results.get(timeout=60.0) == (1, size, int(buffer.long().sum().item()))
        large = torch.zeros(64_000_000, dtype=torch.uint8, device=communicator.device)
        began = time.monotonic()
        with pytest.raises(TransportFailed):
            communicator.broadcast(large, deadline=began + 3.0)
        assert time.monotonic() - began < 10.0
        communicator.abort()
        with pytest.raises(TransportFailed):
            communicator.broadcast(large, deadline=time.monotonic() + 3.0)
    finally:
        process.kill()
        process.join(10.0)


def test_joining_ends_at_the_deadline_when_a_member_does_not_come() -> None:
    store = open_store("127.0.0.1", deadline_s=2.0)
    began = time.monotonic()
    with pytest.raises(TransportFailed, match="rank 0 of 2 could not join over gloo"):
        connect(
            "gloo",
            store_host="127.0.0.1",
            store_port=store.port,
            rank=0,
            world_size=2,
            deadline_s=1.0,
            store=store,
        )
    assert time.monotonic() - began < 10.0
    with pytest.raises(TransportFailed, match="unknown weight transport"):
        connect(
            "pigeon", store_host="127.0.0.1", store_port=store.port, rank=0, world_size=1, deadline_s=1.0, store=store
        )
