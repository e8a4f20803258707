"""The worker side of a pool: a nursery process that forks warm workers, and the loop of a worker.

    daemon --(request + socket)--> nursery --fork--> worker <--(jobs, replies)--> daemon

The nursery has imported and run the slow libraries once, so a killed worker is replaced in milliseconds. Frames on a
worker's socket: 4 bytes little-endian length, then MessagePack. First frame of a worker: `Ready`; then one `Reply`
per job, in order.
"""

import contextlib
import ctypes
import gc
import itertools
import os
import resource
import signal
import socket
import sys
import time
from collections import deque

import msgspec
from msgspec import Struct

from protocol.config.services import RewarddSection
from rewardd.scorers import BatchScorer, CodeScorer, Lane, Outcome, Scorer, Task, make_scorers

MATH_ADDRESS_SPACE = 3 * 2**30
PR_SET_PDEATHSIG = 1


class Job(Struct, array_like=True, frozen=True):
    """One task, numbered by the pool."""

    job_id: int
    task: Task


class Ready(Struct, array_like=True, frozen=True):
    """`problem` = why this worker cannot serve ("" when it can)."""

    pid: int
    problem: str


class Reply(Struct, array_like=True, frozen=True):
    """`cpu_s` and `rss_mb` are the worker's own, so far."""

    job_id: int
    outcome: Outcome
    cpu_s: float
    rss_mb: float


def write_frame(message: object) -> bytes:
    """One frame as bytes."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def nursery(channel: socket.socket) -> None:
    """Fork a worker for every socket that comes over `channel`; end with it."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    lane: Lane | None = None
    while True:
        data, fds, _, _ = socket.recv_fds(channel, 1 << 20, 1)
        if not data:
            return
        request = msgspec.json.decode(data)
        if lane is None:
            lane = request["lane"]
            _warm_up(lane)
        with socket.socket(fileno=fds[0]) as own:
            if os.fork() == 0:
                channel.close()
                _become_worker(own, lane, request["index"], RewarddSection.model_validate(request["section"]))


def _warm_up(lane: Lane) -> None:
    """Import and run the slow libraries; a failure shows itself in the worker, where it is reported."""
    if lane == "math":
        with contextlib.suppress(Exception):
            from rewardd.math import warm_up

            warm_up()
    gc.collect()
    gc.freeze()


def _become_worker(channel: socket.socket, lane: Lane, index: int, section: RewarddSection) -> None:
    status = 1
    try:
        _die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if lane == "math":
            resource.setrlimit(resource.RLIMIT_AS, (MATH_ADDRESS_SPACE, MATH_ADDRESS_SPACE))
        work(channel, lane=lane, index=index, section=section)
        status = 0
    except (BrokenPipeError, ConnectionResetError):
        status = 0
    finally:
        os._exit(status)


def work(channel: socket.socket, *, lane: Lane, index: int, section: RewarddSection) -> None:
    """Serve jobs until the daemon closes the socket."""
    scorers: dict[str, Scorer] = {}
    problem = ""
    try:
        scorers = {name: scorer for name, scorer in make_scorers(section).items() if scorer.lane == lane}
        for scorer in scorers.values():
            if isinstance(scorer, CodeScorer):
                scorer.open(index=index)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    channel.sendall(write_frame(Ready(os.getpid(), problem)))
    jobs: deque[Job] = deque()
    frames = _Frames(channel)
    while not problem:
        if not frames.read_into(jobs):
            return
        for job, outcome in _next_outcomes(scorers, jobs):
            used = resource.getrusage(resource.RUSAGE_SELF)
            reply = Reply(job.job_id, outcome, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
            channel.sendall(write_frame(reply))


class _Frames:
    """Jobs off the socket: blocks for one, and takes what else has come."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._data = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Job)

    def read_into(self, jobs: deque[Job]) -> bool:
        """False at the end of the socket."""
        flags = socket.MSG_DONTWAIT if jobs else 0
        while True:
            try:
                data = self._channel.recv(1 << 18, flags)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._data += data
            while len(self._data) >= 4 and len(self._data) - 4 >= (size := int.from_bytes(self._data[:4], "little")):
                jobs.append(self._decoder.decode(self._data[4 : 4 + size]))
                del self._data[: 4 + size]
            if jobs:
                flags = socket.MSG_DONTWAIT


def _next_outcomes(scorers: dict[str, Scorer], jobs: deque[Job]) -> list[tuple[Job, Outcome]]:
    """Runs the first waiting job, with those after it that go into one batch."""
    scorer = scorers.get(jobs[0].task.scorer)
    if not isinstance(scorer, BatchScorer):
        job = jobs.popleft()
        return [(job, judge(scorers, job.task))]
    same = list(itertools.takewhile(lambda job: job.task.scorer == jobs[0].task.scorer, jobs))
    batch = same[: max(1, scorer.num_in_batch([job.task for job in same]))]
    for _ in batch:
        jobs.popleft()
    begin = time.perf_counter()
    try:
        outcomes = scorer.score_batch([job.task for job in batch])
        if len(outcomes) != len(batch):
            raise RuntimeError(f"{len(outcomes)} outcomes for {len(batch)} answers")
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"[:500]
        outcomes = [Outcome(kind="unjudged", reason="scorer_fault", detail=detail)] * len(batch)
    elapsed_ms = (time.perf_counter() - begin) * 1000
    return [(job, msgspec.structs.replace(o, elapsed_ms=elapsed_ms)) for job, o in zip(batch, outcomes, strict=True)]


def judge(scorers: dict[str, Scorer], task: Task) -> Outcome:
    """One outcome; a fault of the scorer is unjudged, an unusable ground truth is rejected."""
    begin = time.perf_counter()
    scorer = scorers.get(task.scorer)
    try:
        if scorer is None:
            outcome = Outcome(kind="unjudged", reason="no_scorer", detail=f"no scorer {task.scorer!r} in this worker")
        else:
            outcome = scorer.score(task)
    except ValueError as error:
        outcome = Outcome(kind="rejected", reason="bad_ground_truth", detail=str(error)[:500])
    except Exception as error:
        outcome = Outcome(kind="unjudged", reason="scorer_fault", detail=f"{type(error).__name__}: {error}"[:500])
    return msgspec.structs.replace(outcome, elapsed_ms=(time.perf_counter() - begin) * 1000)


if __name__ == "__main__":
    nursery(socket.socket(fileno=int(sys.argv[1])))
