"""The coordinator end to end: scored trajectories into its durable journal, and lease round trips of many generators.

``run(quick)`` gives the figures of ``slipstream bench coordinator``; run as a script it prints them as JSON. The
coordinator is a process of its own behind real sockets; trajectories are acknowledged after they are durable.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq

from protocol import framing
from protocol import messages as m
from protocol.config import Config
from protocol.sockets import Client, Received, make_hello
from tests.learner.coordinator.harness import answer, make_config, rows, trained
from tests.learner.coordinator.process import free_port, start

WINDOW = 256
NUM_GENERATORS = 512


@contextmanager
def coordinator(*, response_tokens: int, groups_per_batch: int) -> Iterator[tuple[Config, str, psutil.Process]]:
    """A running coordinator with groups of 16: its configuration, address and process."""
    with tempfile.TemporaryDirectory(prefix="bench-coordinator-", dir=Path.cwd()) as name:
        folder = Path(name)
        (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows(5000)))
        address = f"tcp://127.0.0.1:{free_port()}"
        config = make_config(
            folder,
            **{
                "coordinator.listen": address,
                "run.max_updates": 1_000_000,
                "learner.groups_per_batch": groups_per_batch,
                "learner.group_size": 16,
                "learner.max_tokens_per_micro_batch": response_tokens + 512,
                "sampling.max_response_tokens": response_tokens,
                "transport.peer_timeout_s": 60.0,
            },
        )
        process: subprocess.Popen[bytes] = start(config, folder)
        try:
            yield config, address, psutil.Process(process.pid)
        finally:
            process.kill()
            process.wait()


def _ask(client: Client, body: Any, arrays: Any = None) -> Any:
    return client.request(body, arrays=arrays, deadline_s=60.0).result(timeout=61.0).body


def _train(trainer: Client, version: list[int], stop: threading.Event) -> None:
    """Trains in no time: takes each batch, reports it, commits a checkpoint."""
    while not stop.is_set():
        plan = _ask(trainer, m.BatchRequest(after_batch_id=version[0], policy_version=version[0], wait_s=0.5))
        if isinstance(plan, m.BatchPlan):
            _ask(trainer, trained(plan))
            version[0] = plan.batch_id
            _ask(trainer, m.CheckpointCommitted(batch_id=plan.batch_id, policy_version=plan.batch_id, path="none"))


def trajectory_rate(*, num_tokens: int, seconds: float) -> tuple[float, float]:
    """Trajectories of `num_tokens` (prompt included) per second, and growth of the resident size in MiB."""
    with coordinator(response_tokens=num_tokens, groups_per_batch=64) as (config, address, process):
        clients = {
            role: Client(address, hello=make_hello(role, name=role), transport=config.transport)  # type: ignore[arg-type]
            for role in ("generator", "rewardd", "trainer")
        }
        for client in clients.values():
            client.start(deadline_s=60.0)
        _ask(clients["trainer"], m.ResumeRequest(last_batch_id=0, policy_version=0, num_ranks=1))
        version, stop = [0], threading.Event()
        thread = threading.Thread(target=_train, args=(clients["trainer"], version, stop))
        thread.start()
        waiting: deque[Future[Received]] = deque()
        done, sizes, begun = 0, [], time.perf_counter()
        while time.perf_counter() - begun < seconds:
            grant = _ask(clients["generator"], m.LeaseRequest(max_slots=WINDOW, policy_version=version[0]))
            for lease, slot in [(each, number) for each in grant.leases for number in each.slots]:
                num_response = num_tokens - len(lease.prompt_token_ids)
                body, arrays = answer(lease, slot, num_tokens=num_response, score=float(slot % 2))
                waiting.append(clients["rewardd"].request(body, arrays=arrays, deadline_s=60.0))
            while len(waiting) > WINDOW or (waiting and (waiting[0].done() or not grant.leases)):
                assert waiting.popleft().result(timeout=61.0).body.status == "accepted"  # type: ignore[union-attr]
                done += 1
            sizes.append(process.memory_info().rss / 2**20)
        rate = done / (time.perf_counter() - begun)
        stop.set()
        thread.join()
        for client in clients.values():
            client.close(deadline_s=0.2)
    return rate, sizes[-1] - sizes[len(sizes) // 4]


def lease_latencies(*, seconds: float) -> list[float]:
    """Round trips in ms of lease requests of 512 generators that each hold 32 slots, ask once a second and report
    the progress of all their slots before."""
    with coordinator(response_tokens=1000, groups_per_batch=512) as (_, address, _):
        context = zmq.Context()
        ids = itertools.count(1)

        def send(socket: zmq.Socket[bytes], body: Any) -> int:
            msg_id = next(ids)
            socket.send_multipart(framing.encode(m.Envelope(body=body, msg_id=msg_id)))
            return msg_id

        def answer_to(socket: zmq.Socket[bytes], msg_id: int) -> Any:
            while True:
                envelope, _ = framing.decode(socket.recv_multipart(), max_bytes=1 << 28)
                if envelope.reply_to == msg_id:
                    return envelope.body

        sockets, held = [], []
        for number in range(NUM_GENERATORS):
            socket = context.socket(zmq.DEALER)
            hello = make_hello("generator", name=f"g{number}")
            socket.setsockopt(zmq.ROUTING_ID, f"{hello.name}/{hello.incarnation}".encode())
            socket.connect(address)
            answer_to(socket, send(socket, hello))
            grant = answer_to(socket, send(socket, m.LeaseRequest(max_slots=32, policy_version=0)))
            held.append([(lease.group_id, slot, lease.attempt) for lease in grant.leases for slot in lease.slots])
            sockets.append(socket)
        latencies: list[float] = []
        begun = time.perf_counter()
        for turn in itertools.count():
            if time.perf_counter() - begun > seconds:
                break
            number = turn % NUM_GENERATORS
            while time.perf_counter() < begun + turn / NUM_GENERATORS:
                continue  # paced without yielding, so that the figure holds no wake-up time of this side
            progress = [
                m.SlotProgress(group_id=g, slot=s, attempt=a, num_tokens=turn // NUM_GENERATORS + 1)
                for g, s, a in held[number]
            ]
            send(sockets[number], m.Heartbeat(state="serving", progress=progress))
            asked = time.perf_counter()
            answer_to(sockets[number], send(sockets[number], m.LeaseRequest(max_slots=4, policy_version=0)))
            latencies.append(1000.0 * (time.perf_counter() - asked))
        for socket in sockets:
            socket.close(linger=0)
        context.term()
    return latencies


def _figure(values: list[float], unit: str) -> dict[str, object]:
    return {
        "value": statistics.median(values),
        "unit": unit,
        "spread": [min(values), max(values)],
        "num_runs": len(values),
    }


def run(quick: bool = False) -> dict[str, dict[str, object]]:
    """Figures ``trajectories_2048_per_s``, ``trajectories_8192_per_s``, ``rss_growth_mb``, ``lease_p50_ms`` and
    ``lease_p99_ms`` (512 generators)."""
    seconds, num_runs = (5.0, 1) if quick else (15.0, 3)
    rates: dict[int, list[float]] = {2048: [], 8192: []}
    growth: list[float] = []
    p50, p99 = [], []
    for _ in range(num_runs):
        for num_tokens, found in rates.items():
            rate, grown = trajectory_rate(num_tokens=num_tokens, seconds=seconds)
            found.append(rate)
            growth.append(grown)
        latencies = lease_latencies(seconds=seconds)
        p50.append(float(np.quantile(latencies, 0.5)))
        p99.append(float(np.quantile(latencies, 0.99)))
    return {
        "trajectories_2048_per_s": _figure(rates[2048], "trajectories/s"),
        "trajectories_8192_per_s": _figure(rates[8192], "trajectories/s"),
        "rss_growth_mb": _figure(growth, "MiB"),
        "lease_p50_ms": _figure(p50, "ms"),
        "lease_p99_ms": _figure(p99, "ms"),
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
