"""Code executor: latency and throughput of fully isolated one-test programs, and attacks that came through.

``run(quick)`` gives the code figures of ``slipstream bench reward``; run as a script it prints them as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rewardd.code import Limits, Sandbox, run_case
from rewardd.code.decode import Kind
from tests.rewardd.code.attack_programs import ADD_ATTACKS, REFUSED_CALLS, STDIN_ATTACKS

PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
TESTS = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
ADD_TESTS = {"assert_case": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}
ADD_CALLS = {"fn_name": "add", "inputs": ["1\n2", "10\n-4"], "outputs": ["3", "6"]}


def _figure(values: list[float], unit: str) -> dict[str, object]:
    return {
        "value": statistics.median(values),
        "unit": unit,
        "spread": [min(values), max(values)],
        "num_runs": len(values),
    }


def _time_one(sandbox: Sandbox) -> float:
    result = run_case(sandbox, kind="stdin", response=None, program=PROGRAM, tests=TESTS, limits=Limits())
    assert result.passed and result.tier == sandbox.tier, result
    return result.elapsed_ms


def latency_ms(sandbox: Sandbox, *, num: int) -> list[float]:
    """Call to verdict of one-test programs, one at a time."""
    return [_time_one(sandbox) for _ in range(num)]


def programs_per_s(sandbox: Sandbox, *, num_cores: int, seconds: float) -> float:
    """Verdicts a second with one program under way per core."""
    until = time.monotonic() + seconds

    def work(_: int) -> int:
        done = 0
        while time.monotonic() < until:
            _time_one(sandbox)
            done += 1
        return done

    with ThreadPoolExecutor(num_cores) as pool:
        return sum(pool.map(work, range(num_cores))) / seconds


def count_attacks_passed(sandbox: Sandbox) -> tuple[int, int]:
    """How many of the attack programs got what they tried for, and how many there are."""
    shapes: list[tuple[Kind, dict[str, Any]]] = [("assert", ADD_TESTS), ("function", ADD_CALLS)]
    through = [
        run_case(sandbox, kind=kind, response=None, program=program, tests=tests).passed
        for program in ADD_ATTACKS.values()
        for kind, tests in shapes
    ]
    secret = {"inputs": [""], "outputs": ["SECRET-314159\n"]}
    refused = {"inputs": [""], "outputs": ["-1\n"]}
    for program in STDIN_ATTACKS.values():
        through.append(run_case(sandbox, kind="stdin", response=None, program=program, tests=secret).passed)
    for program in REFUSED_CALLS.values():
        through.append(not run_case(sandbox, kind="stdin", response=None, program=program, tests=refused).passed)
    return sum(through), len(through)


def run(quick: bool = False) -> dict[str, dict[str, object]]:
    """Figures ``code_ms_p50``, ``code_ms_p95``, ``code_programs_per_s_core`` and ``code_attacks_passed``."""
    num_cores = len(os.sched_getaffinity(0))
    num_runs = 3 if quick else 7
    with Sandbox(num_slots=num_cores) as sandbox:
        latency_ms(sandbox, num=20 * num_cores)
        medians, tails = [], []
        for _ in range(num_runs):
            times = sorted(latency_ms(sandbox, num=100))
            medians.append(statistics.median(times))
            tails.append(times[94])
        rates = [programs_per_s(sandbox, num_cores=num_cores, seconds=1.0) / num_cores for _ in range(num_runs)]
        passed, num_attacks = count_attacks_passed(sandbox)
        tier = sandbox.tier
    return {
        "code_ms_p50": _figure(medians, f"ms call to verdict ({tier})"),
        "code_ms_p95": _figure(tails, f"ms call to verdict ({tier})"),
        "code_programs_per_s_core": _figure(rates, f"one-test programs/s/core on {num_cores} cores"),
        "code_attacks_passed": _figure([float(passed)], f"of {num_attacks} attacks"),
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
