"""The reward daemon: speed of math against math-verify, of isolated programs, and what poison costs.

All through one real daemon process per part, sender and coordinator in this process, one worker per kind and core,
verdict cache off. ``run(quick)`` gives the figures of ``slipstream bench reward``; run as a script it prints them.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import psutil

from protocol.config.services import MathSection, RewarddSection
from rewardd.judge import Judge
from rewardd.pool import wait_readable
from rewardd.scorers import Task, encode_truth
from tests.benchmarks.poison import POISON_PROGRAMS, mixed_items
from tests.benchmarks.reward_rig import (
    Item,
    MemoryWatch,
    Rig,
    adopting_orphans,
    code_item,
    full_mix,
    plain_mix,
    rig,
    survivors,
)

Figure = dict[str, object]
ADD = "a, b = map(int, input().split())\nprint(a + b)"
POISON_TIME_LIMIT_S = 1.0
SPENT = ("timeout", "worker_starved")


def figure(values: list[float], unit: str) -> Figure:
    return {
        "value": statistics.median(values),
        "unit": unit,
        "spread": [min(values), max(values)],
        "num_runs": len(values),
    }


# ---------------------------------------------------------------- math


def _direct(items: list[Item]) -> int:
    """math-verify as its README calls it, on whole responses."""
    from math_verify import parse, verify

    return sum(bool(verify(parse(f"\\boxed{{{item.truth}}}"), parse(item.response))) for item in items)


def direct_rate(items: list[Item], *, num_cores: int, pool: ProcessPoolExecutor) -> float:
    """Answers per second of math-verify called directly, one process per core."""
    parts = [items[core::num_cores] for core in range(num_cores)]
    begin = time.perf_counter()
    list(pool.map(_direct, parts))
    return len(items) / (time.perf_counter() - begin)


def math_figures(*, num_cores: int, num: int, num_runs: int) -> dict[str, Figure]:
    """`math_plain_over_direct`, `math_full_over_direct` and the rates they are made of, both on all cores."""
    figures: dict[str, Figure] = {}
    mixes = {"plain": plain_mix, "full": full_mix}
    with (
        ProcessPoolExecutor(num_cores, mp_context=get_context("spawn")) as pool,
        rig(math={"num_workers": num_cores}) as daemon,
    ):
        for name, mix in mixes.items():
            warm = mix(200, seed=99)
            list(pool.map(_direct, [warm] * num_cores))
            daemon.score(warm)
            ours, direct = [], []
            for seed in range(num_runs):
                items = mix(num, seed=seed)
                scored = daemon.score(items)
                assert None not in scored.verdicts
                ours.append(num / scored.wall_s)
                direct.append(direct_rate(items[: num // 8], num_cores=num_cores, pool=pool))
            figures[f"math_{name}_over_direct"] = figure([a / b for a, b in zip(ours, direct, strict=True)], "x")
            figures[f"math_{name}_per_s"] = figure(ours, f"answers/s through a daemon on {num_cores} cores")
            figures[f"math_{name}_direct_per_s"] = figure(direct, f"answers/s of math-verify on {num_cores} cores")
    return figures


def respawn_ms(num: int) -> list[float]:
    """From SIGKILL of the only worker to the first answer of its replacement."""
    judge = Judge(RewarddSection(math=MathSection(num_workers=1), cache_entries=0))

    def answer(number: int) -> None:
        judge.submit(number, Task(scorer="math", response=f"\\boxed{{{number}}}", truth=encode_truth(str(number))))
        left = 1
        while left:
            wait_readable(judge.fds(), judge.wait_s())
            left -= len(judge.turn())

    times = []
    try:
        for number in range(num):
            answer(number)
            (pid,) = judge.pids("math")
            begin = time.perf_counter()
            psutil.Process(pid).kill()
            while judge.pids("math") == [pid]:
                wait_readable(judge.fds(), judge.wait_s())
                judge.turn()
            answer(number)
            times.append((time.perf_counter() - begin) * 1e3)
    finally:
        judge.close()
    return times


# ---------------------------------------------------------------- code


def code_figures(*, num_cores: int, num: int, num_runs: int) -> dict[str, Figure]:
    """One-test programs: time of one, and rate with one under way per core."""
    inside, round_trips, rates, cpu_ms, tiers = [], [], [], [], set()
    with rig(code={"num_workers": num_cores}) as daemon:
        daemon.score([code_item(number, ADD, answer=number + 2) for number in range(20 * num_cores)])
        for _ in range(num_runs):
            scored, trips = [], []
            for number in range(num // 4):
                one = daemon.score([code_item(number, ADD, answer=number + 2)])
                scored.append(one.verdicts[0])
                trips.append(one.wall_s * 1e3)
            cpu_before = daemon.cpu_s()
            many = daemon.score([code_item(number, ADD, answer=number + 2) for number in range(num)])
            verdicts = [verdict for verdict in [*scored, *many.verdicts] if verdict is not None]
            assert len(verdicts) == num + num // 4 and {verdict.kind for verdict in verdicts} == {"correct"}
            tiers |= {verdict.isolation for verdict in verdicts}
            inside.append(statistics.median(verdict.elapsed_ms for verdict in scored if verdict is not None))
            round_trips.append(statistics.median(trips))
            rates.append(num / many.wall_s / num_cores)
            cpu_ms.append((daemon.cpu_s() - cpu_before) / num * 1e3)
    (tier,) = tiers
    return {
        "code_isolated_ms_p50": figure(inside, "ms from a program to its verdict, as the reply says"),
        "code_round_trip_ms_p50": figure(round_trips, "ms from sending an answer to its acknowledgement"),
        "code_cpu_ms": figure(cpu_ms, "ms of processor time per program, daemon and sandbox together"),
        "isolation_tier": {"value": tier, "unit": "tier in every reply", "spread": [tier, tier], "num_runs": num_runs},
        "code_executions_per_s_per_core": figure(rates, f"programs/s/core through a daemon, {num_cores} cores"),
    }


# ---------------------------------------------------------------- poison


def _net_rate(daemon: Rig, items: list[Item], *, num_cores: int, watch: MemoryWatch | None = None) -> tuple[float, int]:
    """Items per second of the wall time that no time limit was spent in, and items without a verdict."""
    scored = daemon.score(items, window=512, watch=watch)
    verdicts = [verdict for verdict in scored.verdicts if verdict is not None]
    lost = sum(verdict.kind == "unjudged" for verdict in verdicts) + scored.verdicts.count(None)
    spent_s = sum(verdict.elapsed_ms for verdict in verdicts if verdict.reason in SPENT) / 1e3 / num_cores
    return len(items) / (scored.wall_s - spent_s), lost


def poison_figures(*, num_cores: int, num: int) -> dict[str, Figure]:
    """A clean mix, then the same with 2 % of poison in it, through one daemon."""
    workers = {"num_workers": num_cores}
    options = {"max_queue": 2048, "code": workers | {"time_limit_s": POISON_TIME_LIMIT_S}, "math": workers}
    with adopting_orphans() as before:
        with rig(**options) as daemon:
            daemon.score(mixed_items(500, share_of_poison=0.02, seed=1))
            # Buffers reach their largest size at the first flood.
            daemon.score([code_item(number, POISON_PROGRAMS["flood"], answer=0) for number in range(8 * num_cores)])
            clean, lost_clean = _net_rate(daemon, mixed_items(num, share_of_poison=0.0, seed=2), num_cores=num_cores)
            watch = MemoryWatch(daemon.pid, every=max(1, num // 100))
            poisoned, lost = _net_rate(
                daemon, mixed_items(num, share_of_poison=0.02, seed=2), num_cores=num_cores, watch=watch
            )
            running = daemon.programs()
        left = survivors(before, deadline_s=5.0)
    return {
        "poisoned_throughput_fraction": figure([poisoned / clean], "of the clean mix, time limits aside"),
        "poisoned_lost_items": figure([float(lost + lost_clean)], f"of {2 * num} items"),
        "survivor_processes": figure([float(len(left | running))], "alive after verdicts, or after the daemon"),
        "rss_slope_mb_per_10k": figure([watch.slope_mb_per_10k()], "MB of the daemon and its workers per 10,000 items"),
        "poisoned_items_per_s": figure([poisoned], "items/s, time limits aside"),
        "clean_items_per_s": figure([clean], "items/s"),
    }


def run(quick: bool = False) -> dict[str, Figure]:
    """The figures of the module's parts, keyed as `slipstream bench reward` prints them."""
    num_cores = len(os.sched_getaffinity(0))
    figures = math_figures(num_cores=num_cores, num=1200 if quick else 6000, num_runs=1 if quick else 3)
    figures |= code_figures(num_cores=num_cores, num=400 if quick else 1500, num_runs=1 if quick else 3)
    figures |= poison_figures(num_cores=num_cores, num=1000 if quick else 10_000)
    figures["respawn_ms"] = figure(respawn_ms(5 if quick else 20), "ms from SIGKILL of a worker to the next answer")
    return figures


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
