"""The data plane end to end: real coordinator and reward daemon (pass-through verdicts), scripted generators.

Three processes share the machine: the coordinator with its durable journal, one reward daemon, and the load (G
generators with a DEALER of their own to each server, and a trainer stand-in that takes every batch with all shards).
All figures of one run come from one coordinator process:

    wire_fraction_of_raw_zmq       messages a Client sends to a Server, over bare pyzmq moving the same frames
    journal_trajectories_per_s_2k  trajectories acknowledged end to end after the durable commit, G = 64
    journal_trajectories_per_s_8k  the same with 8,192 response tokens
    coordinator_rss_growth_fraction  resident memory at the end of a stretch at full rate over its start (full: minute
                                   2 to 10; quick: the last 6 s of 8)
    lease_rtt_ms_p50_512           a lease request and its grant with 512 live generators at 500 trajectories/s
    cost_ratio_512_over_8          CPU seconds of coordinator and daemon per trajectory, both at the same 1,000/s

``run(quick)`` gives the figures of ``slipstream bench protocol``. Run as a module with names of parts (wire, rates,
cost, memory; none means all) it prints those figures as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import zmq

from protocol import framing
from protocol.config import Config
from protocol.errors import PeerRefused, PeerUnreachable
from protocol.messages import Busy, Heartbeat, HeartbeatAck, Hello, Trajectory, Welcome
from protocol.sockets import Client, Server, make_hello
from tests.benchmarks.bench_wire import TRANSPORT, sample_frames
from tests.support.roles import ask_status, start_role, write_run
from tests.support.swarm import Swarm
from tests.support.wait import wait_until

ACK_EVERY = 100
WINDOW = 400
"""Both hops: the receiver answers every 100th message, the sender has at most 400 under way."""
NUM_SLOTS = 768
"""Slots held by all generators together, below rewardd.max_queue; 64 for one generator, at least 2 for each."""
COST_RATE = 1000.0
RTT_RATE = 500.0
Figures = dict[str, dict[str, object]]


@dataclass(frozen=True)
class Effort:
    """How long is measured: hops of `num_messages` each way, `num_runs` of `seconds` per rate and cost, and the
    memory over `window_s` after `settle_s`; rates at G = 64 and at `other_sizes`."""

    num_hops: int
    num_messages: int
    num_runs: int
    seconds: float
    settle_s: float
    window_s: float
    other_sizes: tuple[int, ...]


FULL = Effort(5, 60_000, 5, 10.0, 120.0, 480.0, (1, 8, 512))
QUICK = Effort(2, 12_000, 2, 1.5, 2.0, 6.0, ())


# ------------------------------------------------------------------ the wire


def _sample() -> tuple[Trajectory, dict[str, np.ndarray]]:
    envelope, arrays = framing.decode(sample_frames(), max_bytes=1 << 30)
    assert isinstance(envelope.body, Trajectory)
    return envelope.body, arrays


def _send_raw(address: str, num: int) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    frames = sample_frames()
    acked = 0
    for sent in range(num):
        while sent - acked >= WINDOW:
            socket.recv_multipart()
            acked += ACK_EVERY
        socket.send_multipart(frames)
    threading.Event().wait()


def _send_ours(address: str, num: int) -> None:
    credit = threading.Semaphore(WINDOW)
    transport = TRANSPORT
    client = Client(
        address,
        hello=make_hello("generator", name="sender"),
        transport=transport,
        on_message=lambda received: credit.release(ACK_EVERY) if isinstance(received.body, Busy) else None,
    )
    client.start(deadline_s=30.0)
    body, arrays = _sample()
    for _ in range(num):
        credit.acquire()
        client.send(body, arrays=arrays)
    threading.Event().wait()


@contextmanager
def _sender(target: object, address: str, num: int) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=(address, num))  # type: ignore[arg-type]
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def raw_hop(num: int) -> float:
    """Messages per second from a bare DEALER to a bare ROUTER."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    with _sender(_send_raw, f"tcp://127.0.0.1:{port}", num):
        start = 0.0
        for received in range(1, num + 1):
            frames = socket.recv_multipart()
            start = start or time.perf_counter()
            if received % ACK_EVERY == 0:
                socket.send_multipart([frames[0], b"ack"])
        rate = (num - 1) / (time.perf_counter() - start)
    socket.close(linger=0)
    context.term()
    return rate


def our_hop(num: int) -> float:
    """Messages per second from a Client to a Server, encoded and decoded, with arrays."""

    def accept(hello: Hello) -> Welcome:
        return Welcome(server="s", incarnation="1", run_id="r", policy_version=0, published_version=0)

    server = Server("tcp://127.0.0.1:0", name="s", transport=TRANSPORT, accept=accept)
    with _sender(_send_ours, server.address, num):
        received, start = 0, 0.0
        while received < num:
            for message in server.poll(1.0):
                if isinstance(message.body, Heartbeat):
                    server.send(message.peer, HeartbeatAck(policy_version=0, published_version=0))
                    continue
                start = start or time.perf_counter()
                received += 1
                if received % ACK_EVERY == 0:
                    server.send(message.peer, Busy(retry_after_s=0.0, reason="credit"))
        rate = (num - 1) / (time.perf_counter() - start)
    server.close(deadline_s=0)
    return rate


# ------------------------------------------------------------------ the roles


@dataclass
class Roles:
    """The two servers under load."""

    config: Config
    coordinator: psutil.Process
    rewardd: psutil.Process

    def cpu_s(self) -> float:
        """CPU seconds of both so far."""
        return sum(sum(process.cpu_times()[:2]) for process in (self.coordinator, self.rewardd))


@contextmanager
def roles(folder: Path) -> Iterator[Roles]:
    """Coordinator and reward daemon of a run in `folder`."""
    config = write_run(
        folder,
        num_prompts=2000,
        **{
            "sampling.max_response_tokens": 8192,
            "data.max_prompt_tokens": 256,
            "learner.groups_per_batch": 128,
            "learner.group_size": 8,
            "learner.max_tokens_per_micro_batch": 16_384,
            "algorithm.max_staleness": 2,
            "trainer.num_ranks": 4,
        },
    )
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for role in ("coordinator", "rewardd"):
            log = folder / f"{role}.log"
            processes.append(start_role(role, config=folder / "config.json", name=role, log=log))
        wait_until(lambda: _serves(config), deadline_s=60.0, what="start of the reward daemon")
        yield Roles(config, *(psutil.Process(process.pid) for process in processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _serves(config: Config) -> bool:
    try:
        return any(role.role == "rewardd" for role in ask_status(config, deadline_s=1.0).roles)
    except (PeerUnreachable, PeerRefused, TimeoutError):
        return False


@contextmanager
def load(roles: Roles, *, num: int, num_tokens: int = 2048, rate: float | None = None) -> Iterator[Swarm]:
    """A started and warm swarm of `num` generators."""
    window = min(64, max(2, NUM_SLOTS // num))
    swarm = Swarm(roles.config, num=num, num_tokens=num_tokens, window=window, rate=rate, tag=f"g{num}x{num_tokens}")
    try:
        swarm.start()
        swarm.run_for(1.0)
        yield swarm
    finally:
        swarm.close()


def rate_of(swarm: Swarm, seconds: float) -> float:
    """Acknowledged trajectories per second over the next `seconds`."""
    before, start = swarm.num_acked, time.perf_counter()
    swarm.run_for(seconds)
    return (swarm.num_acked - before) / (time.perf_counter() - start)


def cost_of(roles: Roles, swarm: Swarm, seconds: float) -> float:
    """Microseconds of CPU per trajectory over the next `seconds`."""
    before, cpu_s = swarm.num_acked, roles.cpu_s()
    swarm.run_for(seconds)
    return (roles.cpu_s() - cpu_s) / max(1, swarm.num_acked - before) * 1e6


def rss_growth(roles: Roles, swarm: Swarm, *, settle_s: float, window_s: float) -> list[float]:
    """Resident memory of the coordinator over its mean in the first tenth of the window, minus 1: last tenth's mean,
    lowest and highest value."""
    swarm.run_for(settle_s)
    samples: list[int] = []
    num = 100
    for _ in range(num):
        swarm.run_for(window_s / num)
        samples.append(roles.coordinator.memory_info().rss)
    base = statistics.mean(samples[: num // 10])
    return [value / base - 1 for value in (statistics.mean(samples[-num // 10 :]), min(samples), max(samples))]


# ------------------------------------------------------------------ figures


def _figure(values: list[float], unit: str) -> dict[str, object]:
    return {
        "value": statistics.median(values),
        "unit": unit,
        "spread": [min(values), max(values)],
        "num_runs": len(values),
    }


def wire_figures(effort: Effort) -> Figures:
    """Bare pyzmq and our own ends, in turn."""
    raw, ours = [], []
    for _ in range(effort.num_hops):
        raw.append(raw_hop(effort.num_messages))
        ours.append(our_hop(effort.num_messages))
    return {
        "wire_fraction_of_raw_zmq": _figure([o / r for o, r in zip(ours, raw, strict=True)], "ratio"),
        "wire_messages_per_s": _figure(ours, "messages of 2,048 tokens per s, Client to Server"),
    }


def rate_figures(servers: Roles, effort: Effort) -> Figures:
    """Trajectories per second after the durable commit."""
    cases = {f"2k_g{num}": (num, 2048) for num in effort.other_sizes} | {"2k": (64, 2048), "8k": (64, 8192)}
    figures: Figures = {}
    for name, (num, num_tokens) in cases.items():
        with load(servers, num=num, num_tokens=num_tokens) as swarm:
            rates = [rate_of(swarm, effort.seconds) for _ in range(effort.num_runs)]
        figures[f"journal_trajectories_per_s_{name}"] = _figure(rates, "trajectories/s")
    return figures


def cost_figures(servers: Roles, effort: Effort) -> Figures:
    """Cost per trajectory with few and with many generators, and the lease round trip with many."""
    figures: Figures = {}
    costs: dict[int, list[float]] = {}
    for num in (8, 512):
        with load(servers, num=num, rate=COST_RATE) as swarm:
            costs[num] = [cost_of(servers, swarm, effort.seconds) for _ in range(effort.num_runs)]
            figures[f"cost_us_g{num}"] = _figure(costs[num], "us of CPU per trajectory, both roles, 1,000/s")
            if num == 512:
                swarm.rate = RTT_RATE
                swarm.grant_s.clear()
                swarm.run_for(effort.num_runs * effort.seconds)
                cuts = [1e3 * cut for cut in statistics.quantiles(swarm.grant_s, n=20)]
                figures["lease_rtt_ms_p50_512"] = {
                    "value": cuts[9],
                    "unit": "ms (spread: 5 % and 95 %)",
                    "spread": [cuts[0], cuts[18]],
                    "num_runs": len(swarm.grant_s),
                }
    ratios = [many / few for many, few in zip(costs[512], costs[8], strict=True)]
    return figures | {"cost_ratio_512_over_8": _figure(ratios, "ratio")}


def memory_figures(servers: Roles, effort: Effort) -> Figures:
    """Growth of the coordinator at full rate."""
    with load(servers, num=64) as swarm:
        growth, low, high = rss_growth(servers, swarm, settle_s=effort.settle_s, window_s=effort.window_s)
    unit = f"of its size at {effort.settle_s:g} s, after {effort.window_s:g} s more at full rate"
    return {
        "coordinator_rss_growth_fraction": {"value": growth, "unit": unit, "spread": [low, high], "num_runs": 1},
    }


PARTS: dict[str, Callable[[Roles, Effort], Figures]] = {
    "rates": rate_figures,
    "cost": cost_figures,
    "memory": memory_figures,
}


def run(quick: bool = False, *, parts: Sequence[str] = ()) -> Figures:
    """The figures of the named `parts` ("wire" and the keys of `PARTS`; none means all)."""
    effort = QUICK if quick else FULL
    wanted = parts or ("wire", *PARTS)
    figures = wire_figures(effort) if "wire" in wanted else {}
    if any(part in wanted for part in PARTS):
        with tempfile.TemporaryDirectory(prefix="bench-protocol-", dir=".") as folder, roles(Path(folder)) as servers:
            for part, measure in PARTS.items():
                if part in wanted:
                    figures |= measure(servers, effort)
    return figures


if __name__ == "__main__":
    print(json.dumps(run(parts=sys.argv[1:]), indent=2))
