"""The judge: tasks in, outcomes out, whatever happens to workers. Routing to pools, retries, cache, canaries.

Both the daemon and offline scoring are built on it. A task of the code lane starts that lane, and the known pairs of a
lane come out right before its first task is scored.
"""

import hashlib
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from time import monotonic

import msgspec

from protocol.config.services import RewarddSection
from protocol.logs import event
from rewardd.breaker import Breaker
from rewardd.canary import CanaryBoard
from rewardd.pool import Pool, wait_readable
from rewardd.scorers import Lane, Outcome, Scorer, Task, make_scorers
from rewardd.worker import judge as judge_inline

log = logging.getLogger(__name__)

MATH_DEPTH = 8
FIRST_RETRY_S = 0.25


class _Open(msgspec.Struct):
    """A task that has no final outcome. `canary` >= 0: index of a known pair."""

    task: Task
    key: bytes = b""
    num_tries: int = 0
    ticket: int = -1


class CanaryFailed(RuntimeError):
    """A known pair came out wrong: nothing this judge says can be trusted."""


class Judge:
    """Used by one thread: `submit`, then `turn` whenever one of `fds` is readable or `wait_s` is over.

    Raises (from `turn`):
        CanaryFailed: a known pair came out wrong.
    """

    def __init__(self, section: RewarddSection) -> None:
        self.reasons: Counter[str] = Counter()
        self.num_retries = 0
        self.num_cached = 0
        self._section = section
        self._scorers: dict[str, Scorer] = make_scorers(section)
        self._pools: dict[Lane, Pool] = {}
        self._boards: dict[Lane, CanaryBoard] = {}
        self._held: dict[Lane, deque[int]] = {}
        self._open: dict[int, _Open] = {}
        self._next_id = 0
        self._retry: list[tuple[float, int]] = []
        self._breakers = {name: Breaker(num_failures=section.breaker_failures) for name in self._scorers}
        self._parked: OrderedDict[int, float] = OrderedDict()
        self._done: list[tuple[int, Outcome]] = []
        self._cache: OrderedDict[bytes, Outcome] = OrderedDict()

    # ------------------------------------------------------------ tasks

    def submit(self, ticket: int, task: Task) -> None:
        """Judge a task; its outcome comes from `turn` exactly once, as (ticket, outcome)."""
        scorer = self._scorers.get(task.scorer)
        if scorer is None:
            self._done.append((ticket, Outcome(kind="rejected", reason="no_scorer", detail=task.scorer)))
            return
        if scorer.lane == "inline":
            self._done.append((ticket, judge_inline(self._scorers, task)))
            return
        if scorer.lane == "code" and not self._section.code.enabled:
            detail = "rewardd.code.enabled is false"
            self._done.append((ticket, Outcome(kind="unjudged", reason="code_disabled", detail=detail)))
            return
        key = b""
        if scorer.pure and self._section.cache_entries:
            key = _key(task)
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                self.num_cached += 1
                self._done.append((ticket, known))
                return
        self.start(scorer.lane)
        job_id = self._new(_Open(task=task, key=key, ticket=ticket))
        if self._boards[scorer.lane].has_passed:
            self._send(job_id)
        else:
            self._held[scorer.lane].append(job_id)

    def start(self, lane: Lane) -> None:
        """Start the workers of a lane and its canaries, unless it is running."""
        if lane in self._pools:
            return
        section = self._section
        num_workers, depth = {
            "math": (section.math.num_workers, MATH_DEPTH),
            "code": (section.code.num_workers, 1),
            "remote": (section.reward_model.num_workers, 2 * section.reward_model.max_batch),
        }[lane]
        self._pools[lane] = Pool(
            section,
            lane=lane,
            num_workers=num_workers,
            depth=depth,
            blame_answers=lane == "math",
            batched=lane == "remote",
        )
        self._held[lane] = deque()
        self._boards[lane] = CanaryBoard(
            [canary for scorer in self._scorers.values() if scorer.lane == lane for canary in scorer.canaries()],
            interval_s=section.canary_s,
        )
        self._start_round(lane)

    def prove(self, lane: Lane, *, deadline_s: float, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Score the known pairs of a lane before anything is promised to anyone; False at the deadline or a stop."""
        self.start(lane)
        end = monotonic() + deadline_s
        while not self.serves(lane):
            self.turn()
            if stopped() or monotonic() >= end:
                event(log, logging.CRITICAL, "scorers not proved", lane=lane, problems=str(self.problems()))
                return False
            wait_readable(self.fds(), self.wait_s())
        return True

    def serves(self, lane: Lane) -> bool:
        """Whether the known pairs of a lane have come out right."""
        return lane in self._boards and self._boards[lane].has_passed

    @property
    def num_open(self) -> int:
        """Tasks and canaries without an outcome."""
        return len(self._open)

    def pids(self, lane: Lane) -> list[int]:
        """Worker processes of a lane that serve."""
        return self._pools[lane].pids()

    def problems(self) -> dict[str, str]:
        """Lanes that cannot serve and why."""
        return {lane: pool.problem for lane, pool in self._pools.items() if pool.problem}

    def metrics(self) -> dict[str, float]:
        """Counters of pools, retries and verdict reasons."""
        metrics = {"rewardd/retries": float(self.num_retries), "rewardd/cached": float(self.num_cached)}
        for lane, pool in self._pools.items():
            metrics[f"rewardd/{lane}/workers"] = float(pool.num_ready)
            metrics[f"rewardd/{lane}/queued"] = float(pool.num_queued)
            metrics[f"rewardd/{lane}/killed"] = float(pool.num_kills)
            metrics[f"rewardd/{lane}/died"] = float(pool.num_deaths)
        metrics["rewardd/parked"] = float(len(self._parked))
        for name, breaker in self._breakers.items():
            if breaker.num_opened:
                metrics[f"rewardd/breaker/{name}/open"] = float(breaker.is_open)
                metrics[f"rewardd/breaker/{name}/opened"] = float(breaker.num_opened)
        for reason, count in self.reasons.items():
            metrics[f"rewardd/reason/{reason}"] = float(count)
        return metrics

    # ------------------------------------------------------------ the loop

    def fds(self) -> list[int]:
        return [fd for pool in self._pools.values() for fd in pool.fds()]

    def wait_s(self) -> float:
        if self._done:
            return 0.0
        now = monotonic()
        waits = [pool.wait_s() for pool in self._pools.values()]
        waits += [when - now for when, _ in self._retry]
        waits += [board.next_round - now for board in self._boards.values()]
        if self._parked:
            waits.append(next(iter(self._parked.values())) - now)
            waits += [max(b.retry_at - now, 0.05) for b in self._breakers.values() if b.is_open]
        return max(0.0, min(waits, default=1.0))

    def turn(self) -> list[tuple[int, Outcome]]:
        """Do what is due; returns the tickets that got their outcome."""
        now = monotonic()
        for when, job_id in [entry for entry in self._retry if entry[0] <= now]:
            self._retry.remove((when, job_id))
            self._send(job_id)
        self._unpark(now)
        for lane, pool in self._pools.items():
            for job_id, outcome in pool.turn():
                self._settle(lane, job_id, outcome)
            if now >= self._boards[lane].next_round:
                self._start_round(lane)
        done, self._done = self._done, []
        for _, outcome in done:
            self.reasons[outcome.reason] += 1
        return done

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _new(self, entry: _Open) -> int:
        self._next_id += 1
        self._open[self._next_id] = entry
        return self._next_id

    def _send(self, job_id: int) -> None:
        entry = self._open[job_id]
        scorer = self._scorers[entry.task.scorer]
        now = monotonic()
        if entry.ticket >= 0 and not self._breakers[entry.task.scorer].admits(job_id, now=now):
            self._parked.setdefault(job_id, now + self._section.breaker_hold_s)
            return
        self._parked.pop(job_id, None)
        self._pools[scorer.lane].submit(job_id, entry.task, deadline_s=scorer.deadline_s)

    def _unpark(self, now: float) -> None:
        """Tasks of a scorer that is left alone: those that waited too long end unjudged, others go once they may."""
        for job_id, until in list(self._parked.items()):
            entry = self._open[job_id]
            if self._breakers[entry.task.scorer].admits(job_id, now=now):
                self._send(job_id)
            elif now >= until:
                del self._parked[job_id], self._open[job_id]
                detail = f"scorer {entry.task.scorer} fails for everything and is left alone"
                self._done.append((entry.ticket, Outcome(kind="unjudged", reason="circuit_open", detail=detail)))

    def _start_round(self, lane: Lane) -> None:
        board = self._boards[lane]
        for index, canary in enumerate(board.begin()):
            self._send(self._new(_Open(task=canary.task, ticket=-1 - index)))
        self._release(lane)

    def _settle(self, lane: Lane, job_id: int, outcome: Outcome) -> None:
        entry = self._open[job_id]
        board = self._boards[lane]
        self._note_health(job_id, entry, outcome)
        if outcome.kind == "unjudged" and entry.num_tries < self._section.max_retries:
            self.num_retries += 1
            self._retry.append((monotonic() + FIRST_RETRY_S * 2**entry.num_tries, job_id))
            entry.num_tries += 1
            return
        del self._open[job_id]
        if entry.ticket >= 0:
            if entry.key and outcome.kind in ("correct", "partial", "wrong") and outcome.reason != "timeout":
                self._cache[entry.key] = outcome
                if len(self._cache) > self._section.cache_entries:
                    self._cache.popitem(last=False)
            self._done.append((entry.ticket, outcome))
            return
        problem = board.note(-1 - entry.ticket, outcome)
        if problem:
            event(log, logging.CRITICAL, "canary failed", lane=lane, problem=problem)
            raise CanaryFailed(f"{lane}: {problem}")
        self._release(lane)

    def _note_health(self, job_id: int, entry: _Open, outcome: Outcome) -> None:
        breaker = self._breakers[entry.task.scorer]
        was_open = breaker.is_open
        judged = outcome.kind != "unjudged"
        breaker.note(job_id, judged=judged, is_first_try=entry.num_tries == 0, now=monotonic())
        if breaker.is_open != was_open:
            state = "left alone: it judges nothing" if breaker.is_open else "back"
            event(log, logging.WARNING, f"scorer {state}", scorer=entry.task.scorer, detail=outcome.detail)

    def _release(self, lane: Lane) -> None:
        """Let held tasks go once the lane is proved, or end them as unjudged when it cannot serve."""
        board, held = self._boards[lane], self._held[lane]
        if board.has_passed:
            while held:
                self._send(held.popleft())
        elif board.is_over:
            problem = self._pools[lane].problem or "the known pairs could not be scored"
            while held:
                entry = self._open.pop(held.popleft())
                self._done.append((entry.ticket, Outcome(kind="unjudged", reason="unavailable", detail=problem)))


def _key(task: Task) -> bytes:
    digest = hashlib.blake2b(task.response.encode(), digest_size=16)
    digest.update(b"\0" + task.scorer.encode() + b"\0" + bytes(task.truth))
    digest.update(msgspec.msgpack.encode((task.extra, task.time_limit_s, task.memory_mb)))
    return digest.digest()
