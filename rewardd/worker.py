"""The worker side of a pool: a nursery process that forks warm workers, and the loop of a worker.

    daemon --(request + socket)--> nursery --fork--> worker <--(jobs, replies)--> daemon

The nursery has imported and run the slow libraries once, so a killed worker is replaced in milliseconds. Frames on a
worker's socket: 4 bytes little-endian length, then MessagePack. First frame of a worker: `Ready`; then one `Reply`
per job, in order.
"""

import contextlib
import ctypes
import gc
import os
import resource
import signal
import socket
import sys
import time

import msgspec
from msgspec import Struct

from protocol.config.services import RewarddSection
from rewardd.scorers import CodeScorer, Lane, Outcome, Scorer, Task, make_scorers

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
    stream = channel.makefile("rb")
    decoder = msgspec.msgpack.Decoder(Job)
    while not problem:
        head = stream.read(4)
        if len(head) < 4:
            return
        job = decoder.decode(stream.read(int.from_bytes(head, "little")))
        outcome = judge(scorers, job.task)
        used = resource.getrusage(resource.RUSAGE_SELF)
        reply = Reply(job.job_id, outcome, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
        channel.sendall(write_frame(reply))


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
