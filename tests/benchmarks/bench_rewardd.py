"""The reward daemon: verdicts per second of the math workers, trajectories per second through a whole daemon, and the
time from killing a worker to the first answer of its replacement.

``run(quick)`` gives the figures of ``slipstream bench rewardd``; run as a script it prints them as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path

from protocol.config.services import MathSection, RewarddSection, TransportSection
from protocol.messages import Busy
from protocol.sockets import Client, make_hello
from rewardd.judge import Judge
from rewardd.pool import wait_readable
from rewardd.scorers import Task, encode_truth
from tests.rewardd.support import daemon, trajectory, write_config
from tests.support.fake_coordinator import FakeCoordinator, ground_truth
from tests.support.wait import wait_until

NUM_TOKENS = 2048
WINDOW = 256


def _drain(judge: Judge, num: int) -> None:
    while num:
        wait_readable(judge.fds(), judge.wait_s())
        num -= len(judge.turn())


def _math(number: int) -> Task:
    response = "Let us think. " * 60 + f"So the answer is $\\boxed{{{number}}}$."
    return Task(scorer="math", response=response, truth=encode_truth(str(number)))


def math_rate(num: int, *, num_workers: int) -> float:
    """Verdicts per second on distinct boxed integers in answers of 800 characters."""
    judge = Judge(RewarddSection(math=MathSection(num_workers=num_workers), cache_entries=0))
    try:
        judge.submit(0, _math(0))
        _drain(judge, 1)
        start = time.perf_counter()
        for number in range(num):
            judge.submit(number, _math(number))
        _drain(judge, num)
        return num / (time.perf_counter() - start)
    finally:
        judge.close()


def respawn_ms(num: int) -> list[float]:
    """From SIGKILL of the only worker to the first answer of its replacement."""
    judge = Judge(RewarddSection(math=MathSection(num_workers=1), cache_entries=0))
    times = []
    try:
        for number in range(num):
            judge.submit(number, _math(number))
            _drain(judge, 1)
            (pid,) = judge._pools["math"].pids()
            start = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            while judge._pools["math"].pids() == [pid]:
                wait_readable(judge.fds(), judge.wait_s())
                judge.turn()
            judge.submit(number, _math(number + num))
            _drain(judge, 1)
            times.append((time.perf_counter() - start) * 1e3)
    finally:
        judge.close()
    return times


def daemon_rate(num: int, *, scorer: str) -> float:
    """Trajectories of 2,048 tokens per second from a sender through the daemon to a coordinator and back."""
    transport = TransportSection()
    coordinator = FakeCoordinator(transport=transport, truths={"p": ground_truth("p", "42")}, keep=False)
    _, arrays = trajectory(0, "p", "", num_prompt=256, num_response=NUM_TOKENS - 256)
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder), coordinator=coordinator.address, scorers={"test": scorer})
        with daemon(config):
            wait_until(lambda: "rewardd-0" in coordinator.hellos)
            address = str(coordinator.hellos["rewardd-0"].attributes["address"])
            client = Client(address, hello=make_hello("generator", name="generator-0"), transport=transport)
            client.start(deadline_s=20)
            waiting: deque = deque()
            begin = time.perf_counter()
            for number in range(num):
                text = _math(number).response
                body, _ = trajectory(number, "p", text, num_prompt=256, num_response=NUM_TOKENS - 256)
                waiting.append(client.request(body, arrays=arrays, deadline_s=60))
                if len(waiting) >= WINDOW:
                    assert not isinstance(waiting.popleft().result().body, Busy)
            for future in waiting:
                assert not isinstance(future.result().body, Busy)
            rate = num / (time.perf_counter() - begin)
            client.close(deadline_s=1)
    coordinator.close()
    return rate


def _figure(values: list[float], unit: str) -> dict[str, object]:
    return {
        "value": statistics.median(values),
        "unit": unit,
        "spread": [min(values), max(values)],
        "num_runs": len(values),
    }


def run(quick: bool = False) -> dict[str, dict[str, object]]:
    """Figures ``math_per_s_1``, ``math_per_s_2`` (workers), ``daemon_passthrough_per_s``, ``daemon_math_per_s`` and
    ``respawn_ms``."""
    num, num_runs = (2_000, 1) if quick else (10_000, 3)
    return {
        "math_per_s_1": _figure([math_rate(num, num_workers=1) for _ in range(num_runs)], "verdicts/s"),
        "math_per_s_2": _figure([math_rate(num, num_workers=2) for _ in range(num_runs)], "verdicts/s"),
        "daemon_passthrough_per_s": _figure(
            [daemon_rate(num, scorer="passthrough") for _ in range(num_runs)], "trajectories/s"
        ),
        "daemon_math_per_s": _figure([daemon_rate(num, scorer="math") for _ in range(num_runs)], "trajectories/s"),
        "respawn_ms": _figure(respawn_ms(5 if quick else 20), "ms"),
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
