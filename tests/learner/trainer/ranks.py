"""Runs a function on several trainer ranks, each a process of its own, over Gloo."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

DEADLINE_S = 120.0


def run_ranks(work: Callable[..., Any], *args: Any, num_ranks: int, out: Path) -> list[Any]:
    """`work(rank, num_ranks, *args)` on every rank; returns the ranks' results. The first failure is raised here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.spawn(_enter, args=(num_ranks, port, str(out), work, args), nprocs=num_ranks, join=False)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not context.join(timeout=deadline - time.monotonic()):  # False also when only some have ended
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks did not finish in {DEADLINE_S} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def _enter(rank: int, num_ranks: int, port: int, out: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    torch.save(work(rank, num_ranks, *args), Path(out) / f"rank{rank}.pt")
