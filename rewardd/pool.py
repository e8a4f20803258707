"""A pool of killable worker processes with one socket each and one job running in each.

The parent keeps the deadline of the running job, counted from the start of its execution (stretched, at most four
times, while the job computes but gets too little of a busy machine). On expiry the worker is killed and replaced, and
the job ends as `wrong` (reason "timeout") if the worker was really computing: an answer made the verifier run without
end. A worker that got no processor time, died or could not start is a fault of ours: the job ends as `unjudged`, which
the caller may try again.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections import OrderedDict, deque
from time import monotonic

import msgspec

from protocol.config.services import RewarddSection
from protocol.logs import event
from rewardd.scorers import Lane, Outcome, Task
from rewardd.worker import Job, Ready, Reply, write_frame

log = logging.getLogger(__name__)

START_DEADLINE_S = 120.0
CLOSE_DEADLINE_S = 5.0
STUCK_S = 0.1
MAX_BACKOFF_S = 10.0
BUSY_SHARE = 0.5
FULL_SHARE = 0.8
COMPUTING_SHARE = 0.05
MAX_STRETCH = 4.0
RECHECK_S = 0.05
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class _Queued(msgspec.Struct):
    job_id: int
    task: Task
    deadline_s: float


class _Worker:
    """One worker process as the parent sees it.

    `jobs` are those sent to it and not answered, the running one first; `lent` are those of them that were queued
    again for others meanwhile.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.jobs: OrderedDict[int, _Queued] = OrderedDict()
        self.lent: set[int] = set()
        self.num_done = 0
        self.num_early_deaths = 0
        self.cpu_s = 0.0
        self.rss_mb = 0.0
        self.since = monotonic()
        self.pid = 0
        self.pidfd = -1
        self.ready = False
        self.retry_at = 0.0
        self.channel: socket.socket | None = None
        self._in = bytearray()
        self._out = bytearray()

    def attach(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self.channel = channel
        self.ready, self.num_done, self.cpu_s, self.since = False, 0, 0.0, monotonic()
        self.jobs.clear()
        self.lent.clear()
        self._in.clear()
        self._out.clear()

    def give(self, job: _Queued, now: float) -> None:
        if not self.jobs:
            self.since = now
        self.jobs[job.job_id] = job
        self._out += write_frame(Job(job.job_id, job.task))
        self.write()

    def write(self) -> None:
        assert self.channel is not None
        while self._out:
            try:
                del self._out[: self.channel.send(self._out)]
            except BlockingIOError:
                return
            except OSError:  # the end of the socket shows itself when reading
                self._out.clear()

    @property
    def is_writing(self) -> bool:
        return bool(self._out)

    def read(self) -> tuple[list[bytes], bool]:
        """Whole frames that have come, and whether the worker is still there."""
        assert self.channel is not None
        alive = True
        while True:
            try:
                data = self.channel.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                alive = False
                break
            self._in += data
        frames = []
        start = 0
        while len(self._in) - start >= 4:
            size = int.from_bytes(self._in[start : start + 4], "little")
            if len(self._in) - start - 4 < size:
                break
            frames.append(bytes(self._in[start + 4 : start + 4 + size]))
            start += 4 + size
        del self._in[:start]
        return frames, alive

    def cpu_of_running_job(self) -> float:
        """Processor seconds since the last reply (0 when the process is gone)."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rsplit(b")", 1)[1].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS - self.cpu_s

    def kill(self) -> None:
        """End the process (through its pidfd, so never another one under a reused pid) and drop the socket."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.close(self.pidfd)
            self.pidfd = -1
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        self.ready = False


class Pool:
    """Used by one thread: `submit`, and `turn` whenever one of `fds` is readable or `wait_s` is over.

    Args:
        lane: which scorers the workers hold.
        depth: jobs sent to a worker ahead of time (only the first of them runs).
        max_jobs, max_rss_mb: a worker is replaced, between jobs, after this many or above this size.
        blame_answers: whether a running job that reaches its deadline is the answer's doing (else a fault of ours).
        batched: a worker runs several of its jobs at once, so none waits behind another.
    """

    def __init__(
        self,
        section: RewarddSection,
        *,
        lane: Lane,
        num_workers: int,
        depth: int,
        max_jobs: int = 20_000,
        max_rss_mb: float = 1024.0,
        blame_answers: bool = True,
        batched: bool = False,
    ) -> None:
        self.lane = lane
        self.problem = ""
        self.num_kills = 0
        self.num_deaths = 0
        self.num_recycled = 0
        self._section = section.model_dump(mode="json")
        self._depth = depth
        self._max_jobs = max_jobs
        self._max_rss_mb = max_rss_mb
        self._blame_answers = blame_answers
        self._batched = batched
        self._queue: deque[_Queued] = deque()
        self._open: set[int] = set()
        self._done: list[tuple[int, Outcome]] = []
        self._workers = [_Worker(index) for index in range(num_workers)]
        self._nursery: subprocess.Popen[bytes] | None = None
        self._nursery_channel: socket.socket | None = None
        self._ready_decoder = msgspec.msgpack.Decoder(Ready)
        self._reply_decoder = msgspec.msgpack.Decoder(Reply)
        for worker in self._workers:
            self._spawn(worker)

    def submit(self, job_id: int, task: Task, *, deadline_s: float) -> None:
        """Queue a job; its outcome comes from `turn` exactly once."""
        assert job_id not in self._open
        self._open.add(job_id)
        self._queue.append(_Queued(job_id, task, deadline_s))

    def fds(self) -> list[int]:
        """What becomes readable when there is something to do."""
        return [worker.channel.fileno() for worker in self._workers if worker.channel is not None]

    def wait_s(self) -> float:
        """Longest time until `turn` has to be called without anything readable."""
        now = monotonic()
        if self._queue and self._free(now):
            return 0.0
        wait = 1.0
        for worker in self._workers:
            if worker.is_writing:
                return 0.005
            if worker.jobs:
                running = next(iter(worker.jobs.values()))
                left = worker.since + running.deadline_s - now
                wait = min(wait, left if left > 0 else RECHECK_S)
                if len(worker.jobs) > 1 + len(worker.lent) and not self._batched:
                    wait = min(wait, max(worker.since + STUCK_S - now, 0.01))
            elif worker.channel is None:
                wait = min(wait, worker.retry_at - now)
        return max(wait, 0.0)

    @property
    def num_ready(self) -> int:
        """Workers that serve."""
        return sum(worker.ready for worker in self._workers)

    @property
    def num_queued(self) -> int:
        """Jobs without an outcome."""
        return len(self._open)

    def pids(self) -> list[int]:
        """Processes of the workers that serve."""
        return [worker.pid for worker in self._workers if worker.ready]

    def turn(self) -> list[tuple[int, Outcome]]:
        """Do what is due; returns (job_id, outcome) of the jobs that ended."""
        now = monotonic()
        for worker in self._workers:
            if worker.channel is None:
                if now >= worker.retry_at:
                    self._spawn(worker)
                continue
            worker.write()
            frames, alive = worker.read()
            for frame in frames:
                self._take(worker, frame, now)
            if not alive:
                self._bury(worker, now)
            elif worker.channel is not None:
                self._check(worker, now)
        self._dispatch(now)
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Kill the workers and the nursery, and wait for their end."""
        pidfds = [os.dup(worker.pidfd) for worker in self._workers if worker.pidfd >= 0]
        for worker in self._workers:
            worker.kill()
        self._stop_nursery()
        for pidfd in pidfds:
            wait_readable([pidfd], CLOSE_DEADLINE_S)
            os.close(pidfd)

    # ------------------------------------------------------------ the life of a worker

    def _spawn(self, worker: _Worker) -> None:
        if self._nursery is None or self._nursery.poll() is not None:
            self._start_nursery()
        assert self._nursery_channel is not None
        ours, theirs = socket.socketpair()
        request = {"lane": self.lane, "index": worker.index, "section": self._section}
        try:
            with theirs:
                socket.send_fds(self._nursery_channel, [msgspec.json.encode(request)], [theirs.fileno()])
        except OSError as error:
            ours.close()
            event(log, logging.ERROR, "cannot start a worker", lane=self.lane, error=str(error))
            worker.retry_at = monotonic() + MAX_BACKOFF_S
            return
        worker.attach(ours)

    def _start_nursery(self) -> None:
        self._stop_nursery()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "rewardd.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        ours.setblocking(False)
        self._nursery_channel = ours

    def _stop_nursery(self) -> None:
        if self._nursery_channel is not None:
            self._nursery_channel.close()
        if self._nursery is not None:
            self._nursery.kill()
            self._nursery.wait()
        self._nursery = self._nursery_channel = None

    def _take(self, worker: _Worker, frame: bytes, now: float) -> None:
        if not worker.ready:
            ready = self._ready_decoder.decode(frame)
            worker.pid, self.problem = ready.pid, ready.problem
            if ready.problem:
                event(log, logging.ERROR, "worker cannot serve", lane=self.lane, problem=ready.problem)
                self._fail_all("unavailable", ready.problem)
                return
            try:
                worker.pidfd = os.pidfd_open(ready.pid)
            except ProcessLookupError:
                return
            worker.ready, worker.since = True, now
            return
        reply = self._reply_decoder.decode(frame)
        worker.jobs.pop(reply.job_id, None)
        worker.lent.discard(reply.job_id)
        worker.since, worker.cpu_s, worker.rss_mb = now, reply.cpu_s, reply.rss_mb
        worker.num_done += 1
        worker.num_early_deaths = 0
        self._finish(reply.job_id, reply.outcome)

    def _check(self, worker: _Worker, now: float) -> None:
        """Deadlines of the start and of the running job, and recycling between jobs."""
        if not worker.ready:
            if now - worker.since > START_DEADLINE_S:
                event(log, logging.ERROR, "worker did not start in time", lane=self.lane, worker=worker.index)
                self._stop_nursery()
                self._bury(worker, now)
            return
        if not worker.jobs:
            if self._is_worn(worker):
                self.num_recycled += 1
                worker.rss_mb = 0.0
                worker.kill()
                self._spawn(worker)
            return
        running = next(iter(worker.jobs.values()))
        age = now - worker.since
        if age >= running.deadline_s:
            if not self._is_held_up(worker, running, age):
                self._expire(worker, running)
        elif age >= STUCK_S and len(worker.jobs) > 1 and not self._batched:
            self._take_back(worker)

    def _is_held_up(self, worker: _Worker, running: _Queued, age: float) -> bool:
        """Whether a job past its deadline computes, but got too little of a busy machine to be blamed yet."""
        if not self._blame_answers or age >= MAX_STRETCH * running.deadline_s:
            return False
        used_s = worker.cpu_of_running_job()
        return COMPUTING_SHARE * age <= used_s < FULL_SHARE * running.deadline_s

    def _is_worn(self, worker: _Worker) -> bool:
        return worker.num_done >= self._max_jobs or worker.rss_mb > self._max_rss_mb

    def _expire(self, worker: _Worker, running: _Queued) -> None:
        used_s = worker.cpu_of_running_job()
        if self._blame_answers and used_s >= BUSY_SHARE * running.deadline_s:
            outcome = Outcome(kind="wrong", reason="timeout", has_form=True, elapsed_ms=running.deadline_s * 1000)
        else:
            reason = "deadline" if self._batched else "worker_starved"
            outcome = Outcome(kind="unjudged", reason=reason, elapsed_ms=running.deadline_s * 1000)
        event(
            log, logging.WARNING, "worker killed at the deadline", lane=self.lane, cpu_s=used_s, reason=outcome.reason
        )
        self.num_kills += 1
        if running.job_id not in worker.lent:
            self._finish(running.job_id, outcome)
        self._take_back(worker)
        worker.kill()
        self._spawn(worker)

    def _bury(self, worker: _Worker, now: float) -> None:
        """A worker is gone: its running job failed through no fault of the answer, the others go back."""
        was_ready = worker.ready
        running = next(iter(worker.jobs), None)
        if running is not None and running not in worker.lent:
            self._finish(running, Outcome(kind="unjudged", reason="worker_died"))
        self._take_back(worker)
        worker.kill()
        self.num_deaths += 1
        if not was_ready or worker.num_done == 0:
            worker.num_early_deaths += 1
        backoff = 0.0 if worker.num_early_deaths == 0 else min(MAX_BACKOFF_S, 0.1 * 2**worker.num_early_deaths)
        worker.retry_at = now + backoff
        event(log, logging.WARNING, "worker died", lane=self.lane, worker=worker.index, restart_in_s=backoff)
        if backoff == 0.0:
            self._spawn(worker)

    # ------------------------------------------------------------ jobs

    def _dispatch(self, now: float) -> None:
        """Fill workers evenly, each up to `depth`; one that is stuck gets nothing more."""
        while self._queue:
            free = self._free(now)
            if not free:
                return
            worker = min(free, key=lambda w: len(w.jobs))
            job = self._queue.popleft()
            if job.job_id in worker.lent:
                worker.lent.discard(job.job_id)  # it is there already, and its own again
            elif job.job_id in self._open:
                worker.give(job, now)

    def _free(self, now: float) -> list[_Worker]:
        return [
            worker
            for worker in self._workers
            if worker.ready
            and len(worker.jobs) < self._depth
            and (self._batched or not (worker.jobs and now - worker.since >= STUCK_S))
            and not self._is_worn(worker)
        ]

    def _take_back(self, worker: _Worker) -> None:
        """Queue again what waits behind the running job. Should the worker answer it all the same, the first of the
        two answers counts."""
        waiting = [job for job in list(worker.jobs.values())[1:] if job.job_id not in worker.lent]
        worker.lent.update(job.job_id for job in waiting)
        self._queue.extendleft(reversed(waiting))

    def _finish(self, job_id: int, outcome: Outcome) -> None:
        if job_id in self._open:
            self._open.discard(job_id)
            self._done.append((job_id, outcome))

    def _fail_all(self, reason: str, detail: str) -> None:
        """No worker can serve: nothing that waits is worth waiting for."""
        if self.num_ready:
            return
        for job_id in list(self._open):
            self._finish(job_id, Outcome(kind="unjudged", reason=reason, detail=detail))
        self._queue.clear()


def wait_readable(fds: list[int], timeout_s: float) -> None:
    """Wait until one of the descriptors is readable, or for `timeout_s`."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    poller.poll(max(0, int(timeout_s * 1000)))
