"""vLLM's queues on CPUs: a reader that has nothing to read leaves the core to others."""

import time
from pathlib import Path

import pytest
import zmq

from generators import vllm_adapter as adapter


def test_reader_sleeps_until_the_recheck_instead_of_spinning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    monkeypatch.setattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS", 5000)
    monkeypatch.setattr(shm_broadcast.SpinCondition, "__init__", shm_broadcast.SpinCondition.__init__)
    adapter.wait_without_spinning()
    adapter.wait_without_spinning()
    assert shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS < 100

    context = zmq.Context()  # ipc below: ending a context with an inproc connection to nobody can abort the process
    condition = shm_broadcast.SpinCondition(is_reader=True, context=context, notify_address=f"ipc://{tmp_path}/queue")
    condition.record_read()
    begun = time.monotonic()
    condition.wait(timeout_ms=60)
    waited = time.monotonic() - begun
    for socket in (condition.local_notify_socket, condition.read_cancel_socket, condition.write_cancel_socket):
        socket.close(linger=0)
    context.term()
    assert waited > 0.05
