"""A real reward daemon between a sender and a coordinator of the benchmark, and the answers they send."""

from __future__ import annotations

import ctypes
import json
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from protocol.config.services import TransportSection
from protocol.messages import Busy, Verdict
from protocol.sockets import Client, make_hello
from tests.rewardd.support import daemon, trajectory, write_config
from tests.support.fake_coordinator import FakeCoordinator, ground_truth
from tests.support.wait import wait_until

NUM_PROMPT, NUM_RESPONSE = 64, 448
WINDOW = 256
PR_SET_CHILD_SUBREAPER = 36
CASES = Path(__file__).resolve().parents[1] / "rewardd" / "math" / "math_cases.jsonl"
FILLER = "Let us go on, step by step, with what we know so far and what we can conclude from it. " * 14


@dataclass(frozen=True)
class Item:
    """An answer (with the reasoning around it) and the prompt it belongs to."""

    prompt_id: str
    truth: object
    response: str


@dataclass
class Scored:
    """What came back for a list of items: verdicts by position (None: lost) and the wall time."""

    verdicts: list[Verdict | None]
    wall_s: float


def code_item(number: int, program: str, *, answer: int) -> Item:
    """A program that is to print `answer`, asked for with its own input."""
    tests = {"inputs": [f"{number} 2\n"], "outputs": [f"{answer}\n"]}
    return Item(f"code-{number}-{answer}", json.dumps(tests), f"{FILLER}\n```python\n{program}\n```")


def math_item(name: str, gold: str, answer: str) -> Item:
    return Item(f"math-{gold}", gold, f"{FILLER}{name}. So the answer is $\\boxed{{{answer}}}$.")


def plain_mix(num: int, *, seed: int = 0) -> list[Item]:
    """Integers, fractions, decimals and short texts, three of four right."""
    rng = random.Random(seed)
    items = []
    for index in range(num):
        a, b = rng.randrange(2, 10_000), rng.randrange(2, 99)
        kind = index % 8
        gold, same = {
            0: (f"{a}", f"{a}"),
            1: (f"{a}", f"{a}.0"),
            2: (f"\\frac{{{a}}}{{{b}}}", f"\\frac{{{2 * a}}}{{{2 * b}}}"),
            3: (f"{a / 100:.2f}", f"{a / 100:.2f}"),
            4: (f"{a * 1000}", f"{a},000"),
            5: ("ABCD"[a % 4], f"\\text{{{'ABCD'[a % 4]}}}"),
            6: (f"-{a}", f"-{a}"),
            7: (f"{a}", f"x={a}"),
        }[kind]
        items.append(math_item(f"Attempt {index}", gold, same if index % 4 else f"{a + 1}"))
    return items


def full_mix(num: int, *, seed: int = 0) -> list[Item]:
    """The recorded cases of every kind except those made to hang a verifier, in a fixed random order."""
    cases = [json.loads(line) for line in CASES.read_text("utf-8").splitlines()]
    cases = [case for case in cases if not case["category"].startswith("pathological") and len(case["response"]) < 4000]
    rng = random.Random(seed)
    chosen = [cases[index % len(cases)] for index in range(num)]
    rng.shuffle(chosen)
    return [
        Item(f"case-{case['id']}", case["gold"], f"Attempt {index}. {FILLER}\n{case['response']}")
        for index, case in enumerate(chosen)
    ]


@contextmanager
def adopting_orphans() -> Iterator[set[int]]:
    """Processes orphaned below this one become its children, so that none can hide; gives the pids there before."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield {child.pid for child in psutil.Process().children(recursive=True)}
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


def survivors(before: set[int], *, deadline_s: float) -> set[int]:
    """New processes that are alive after a moment; adopted ones that have ended are reaped."""
    alive: set[int] = set()

    def all_ended() -> bool:
        alive.clear()
        for child in psutil.Process().children(recursive=True):
            if child.pid in before:
                continue
            with suppress(psutil.NoSuchProcess, ChildProcessError):
                if child.ppid() != os.getpid() or os.waitpid(child.pid, os.WNOHANG)[0] == 0:
                    alive.add(child.pid)
        return not alive

    with suppress(AssertionError):
        wait_until(all_ended, deadline_s=deadline_s)
    return alive


class Rig:
    """Sends items through one daemon and collects the verdicts at the coordinator."""

    def __init__(self, coordinator: FakeCoordinator, client: Client, pid: int) -> None:
        self.pid = pid
        self._coordinator = coordinator
        self._client = client
        self._next_group = 0
        _, self._arrays = trajectory(0, "p", "", num_prompt=NUM_PROMPT, num_response=NUM_RESPONSE)

    def score(self, items: Sequence[Item], *, window: int = WINDOW, watch: MemoryWatch | None = None) -> Scored:
        """Send all items, at most `window` unacknowledged at a time."""
        for item in items:
            if item.prompt_id not in self._coordinator.truths:
                ability = "code" if item.prompt_id.startswith("code") else "math"
                truth = ground_truth(item.prompt_id, item.truth, ability=ability)
                self._coordinator.truths[item.prompt_id] = truth
        first = self._next_group
        self._next_group += len(items)
        waiting: deque = deque()
        begin = time.perf_counter()
        for index, item in enumerate(items):
            body, _ = trajectory(
                first + index, item.prompt_id, item.response, num_prompt=NUM_PROMPT, num_response=NUM_RESPONSE
            )
            waiting.append(self._client.request(body, arrays=self._arrays, deadline_s=120))
            if len(waiting) >= window:
                self._finish(waiting.popleft())
            if watch is not None:
                watch.note(index)
        for future in waiting:
            self._finish(future)
        wall_s = time.perf_counter() - begin
        verdicts: list[Verdict | None] = [None] * len(items)
        for received in self._coordinator.scored:
            verdicts[received.body.trajectory.group_id - first] = received.body.verdict
        self._coordinator.scored.clear()
        return Scored(verdicts, wall_s)

    def cpu_s(self) -> float:
        """Processor time of the daemon, its workers and all programs they have run, so far."""
        root = psutil.Process(self.pid)
        times = [process.cpu_times() for process in [root, *root.children(recursive=True)]]
        return sum(t.user + t.system + t.children_user + t.children_system for t in times)

    def programs(self) -> set[int]:
        """What is alive below the sandbox's fork servers (the children of the workers) though all verdicts are out."""
        nurseries = psutil.Process(self.pid).children()
        servers = [server for nursery in nurseries for worker in nursery.children() for server in worker.children()]
        return {program.pid for server in servers for program in server.children(recursive=True)}

    @staticmethod
    def _finish(future: object) -> None:
        answer = future.result().body  # type: ignore[attr-defined]
        assert not isinstance(answer, Busy), answer


@contextmanager
def rig(**rewardd: object) -> Iterator[Rig]:
    """A daemon with this `rewardd` section, verdict cache off."""
    transport = TransportSection()
    coordinator = FakeCoordinator(transport=transport)
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = write_config(Path(folder), coordinator=coordinator.address, cache_entries=0, **rewardd)
            with daemon(config) as process:
                wait_until(lambda: "rewardd-0" in coordinator.hellos, deadline_s=120)
                address = str(coordinator.hellos["rewardd-0"].attributes["address"])
                client = Client(address, hello=make_hello("generator", name="generator-0"), transport=transport)
                client.start(deadline_s=20)
                yield Rig(coordinator, client, process.pid)
                client.close(deadline_s=1)
                process.terminate()
                process.wait(30)
    finally:
        coordinator.close()


class MemoryWatch:
    """Proportional resident size of the daemon and its own processes (not of the programs it runs) over a run."""

    def __init__(self, pid: int, *, every: int) -> None:
        self._root = psutil.Process(pid)
        self._every = every
        self._samples: list[tuple[int, float]] = []

    def note(self, index: int) -> None:
        if index % self._every == 0:
            self._samples.append((index, self._resident_mb()))

    def _resident_mb(self) -> float:
        total = 0
        own = self._root.uids().real
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                if process.uids().real == own:
                    total += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
        return total / 2**20

    def slope_mb_per_10k(self) -> float:
        """Median of the slopes between all pairs of samples (Theil and Sen): a worker that is being replaced at one of
        them does not matter. The first fifth, warm-up, is left out."""
        index, resident = np.array(self._samples[len(self._samples) // 5 :], dtype=np.float64).T
        first, second = np.triu_indices(len(index), k=1)
        return float(np.median((resident[second] - resident[first]) / (index[second] - index[first])) * 10_000)
