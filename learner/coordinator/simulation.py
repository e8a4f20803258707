"""Discrete-event simulation of a run: the real coordinator, simulated generators, trainer and clock.

Nothing sleeps and no socket is opened: generators sample at a given rate per running slot, the trainer takes a given
time per batch, and every decision (leases, moves, batches, staleness) is the coordinator's own. `slipstream plan` and
the tests of the staleness rules use it.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.coordinator.journal import Arrays, Journal, Location
from learner.coordinator.metrics import RecordFile
from learner.coordinator.schema import open_database
from learner.coordinator.service import Coordinator
from learner.coordinator.simulated_engine import Engine, Request
from learner.coordinator.simulation_setup import (
    PROMPT_TOKENS,
    Setup,
    SimulatedGenerator,
    config_of,
    length_table,
    simulated_prompts,
)
from learner.coordinator.store import Store
from learner.data.tokenization import TokenizerFacts
from protocol import messages as m

__all__ = ["Result", "Setup", "SimulatedGenerator", "simulate"]

_FACTS = TokenizerFacts(vocab_size=100, stop_token_ids=(1,))


@dataclass
class Result:
    """What happened.

    `drawn_share`, `trained_share` [10]: share of tokens by decile of answer length. `idle` per generator: share of
    the time without any running request while prompts were left; `slots_empty`: share of slot-seconds likewise.
    `max_trained_staleness` is over tokens in the loss; `masked_share` the tokens left out of it for their age.
    `batches` holds, per trained batch, when it was done and how long its training took; `slot_seconds` is what the
    attempts that finished took together.
    """

    seconds: float = 0.0
    num_batches: int = 0
    num_moved_slots: int = 0
    generated_tokens: int = 0
    slot_seconds: float = 0.0
    trained_tokens: int = 0
    masked_tokens: int = 0
    lost_tokens: int = 0
    max_trained_staleness: int = 0
    trainer_idle: float = 0.0
    batches: list[tuple[float, float]] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    slots_empty: list[float] = field(default_factory=list)
    drawn_share: list[float] = field(default_factory=list)
    trained_share: list[float] = field(default_factory=list)
    ledger: dict[str, int | bool] = field(default_factory=dict)

    @property
    def masked_share(self) -> float:
        """Masked and lost tokens over all tokens of finished answers."""
        return (self.masked_tokens + self.lost_tokens) / max(1, self.trained_tokens + self.masked_tokens)

    @property
    def tokens_per_s(self) -> float:
        return self.trained_tokens / self.seconds if self.seconds > 0.0 else 0.0


def simulate(setup: Setup) -> Result:
    """Simulates one pass over the prompts."""
    with TemporaryDirectory(prefix="slipstream-sim-") as folder:
        return _Simulation(setup, Path(folder)).run()


class _ScratchJournal(Journal):
    """Keeps partial answers only, in memory: the simulated trainer reads no arrays."""

    def __init__(self) -> None:
        self._records: dict[int, dict[str, NDArray[np.generic]]] = {}
        self._count = count()

    def append(self, arrays: Arrays) -> Location:
        location = Location(0, next(self._count))
        if len(arrays["token_ids"]) == len(arrays["loss_mask"]):  # no prompt: a partial answer
            self._records[location.offset] = dict(arrays)
        return location

    def read(self, location: Location) -> dict[str, NDArray[np.generic]]:
        return self._records[location.offset]

    def sync(self) -> None:
        return

    def num_bytes(self) -> int:
        return 0

    def delete_except(self, needed: Collection[int]) -> list[int]:
        return []


class _Simulation:
    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup = setup
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = count()
        self._msg_ids = count(1)
        self._replies: dict[int, Callable[[Any, dict[str, NDArray[np.generic]]], None]] = {}
        self._lengths: dict[tuple[str, int], int] = {}
        self._counts: dict[tuple[int, int], tuple[str, dict[int, int]]] = {}
        self._drawn: defaultdict[int, int] = defaultdict(int)
        self._trained: defaultdict[int, int] = defaultdict(int)
        self._over_at: float | None = None
        self._train_s = 0.0
        self._rewardd_free = [0.0] * setup.num_rewardd
        self.result = Result()
        prompts = simulated_prompts(setup.num_prompts)
        store = Store(open_database(folder / "ledger.sqlite"))
        store.connection.execute("PRAGMA synchronous = OFF")
        self.coordinator = Coordinator(
            config_of(setup, folder),
            train=prompts,
            evaluation=None,
            tokenizer=_FACTS,
            tokenizer_hash=None,
            shape=None,
            store=store,
            journal=_ScratchJournal(),
            metrics=RecordFile(folder / "metrics.jsonl"),
            evaluations=RecordFile(folder / "eval.jsonl"),
            clock=lambda: self.now,
        )
        self._store = store
        self.trainer, self.rewardd = self._join("trainer", "t"), self._join("rewardd", "r")
        self.generators = [
            Engine(generator, self._join("generator", f"g{i}")) for i, generator in enumerate(setup.generators)
        ]
        lengths = length_table(setup)
        for row, prompt in enumerate(prompts.prompts):
            for slot in range(setup.group_size):
                self._lengths[prompt.prompt_id, slot] = int(lengths[row, slot])
        self._edges = np.quantile(lengths, np.arange(0.1, 1.0, 0.1))

    # ------------------------------------------------------------ machinery

    def _join(self, role: Any, name: str) -> str:
        hello = m.Hello(
            role=role, name=name, incarnation="1", protocol_version=m.PROTOCOL_VERSION, host="simulated", pid=1
        )
        assert isinstance(self.coordinator.accept(hello), m.Welcome)
        return f"{name}/1"

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._sequence), action))

    def _send(
        self,
        key: str,
        body: Any,
        arrays: dict[str, NDArray[Any]] | None = None,
        then: Callable[[Any, dict[str, NDArray[np.generic]]], None] = lambda body, arrays: None,
    ) -> None:
        msg_id = next(self._msg_ids)
        self._replies[msg_id] = then
        self.coordinator.handle(key, body, arrays or {}, msg_id=msg_id)

    def run(self) -> Result:
        """Runs events until the run is finished."""
        self._send(self.trainer, m.ResumeRequest(last_batch_id=0, policy_version=0, num_ranks=1))
        self._ask_batch(0)
        for generator in self.generators:
            self._at(0.0, lambda g=generator: self._ask_lease(g))  # type: ignore[misc]
            self._at(self.setup.heartbeat_s, lambda g=generator: self._beat(g))  # type: ignore[misc]
        self._settle()
        while self._events and self.coordinator.facts.state == "running":
            self.now, _, action = heapq.heappop(self._events)
            action()
            self._settle()
            if self._over_at is None and self.coordinator.pool.exhausted:
                self._stop_counting_idle()
        self._finish()
        return self.result

    def _settle(self) -> None:
        """What the shell does after messages: tick, commit, send; until nothing is left to send."""
        while True:
            self.coordinator.tick()
            self.coordinator.commit()
            outbox = self.coordinator.take_outbox()
            if not outbox:
                return
            for message in outbox:
                assert message.reply_to is not None
                self._replies.pop(message.reply_to)(message.body, dict(message.arrays or {}))

    # ------------------------------------------------------------ generators

    def _ask_lease(self, generator: Engine) -> None:
        room = generator.setup.num_slots - len(generator.running)
        if room <= 0 or generator.asking:
            return
        generator.asking = True

        def take(grant: m.LeaseGrant, arrays: dict[str, NDArray[np.generic]]) -> None:
            generator.asking = False
            generator.book(self.now)
            for lease in grant.leases:
                for slot in lease.slots:
                    self._begin(generator, lease, slot, arrays)
            self._await_end(generator)
            if len(generator.running) < generator.setup.num_slots:
                generator.asking = True
                self._at(self.now + self.setup.retry_s, retry)

        def retry() -> None:
            generator.asking = False
            self._ask_lease(generator)

        request = m.LeaseRequest(max_slots=room, policy_version=generator.version)
        self._send(generator.key, request, then=take)

    def _begin(self, generator: Engine, lease: m.Lease, slot: int, arrays: dict[str, NDArray[np.generic]]) -> None:
        length = self._lengths[lease.prompt_id, slot]
        begun_with = arrays.get(f"partial/{lease.group_id}/{slot}/versions", np.empty(0, "<i4")).astype("<i4")
        first = generator.steps + generator.setup.prefill_steps
        request = Request(lease, slot, length, first, self.now, begun_with)
        generator.running[lease.group_id, slot, lease.attempt] = request
        if lease.attempt == 1:
            self._drawn[self._decile(length)] += length

    def _await_end(self, generator: Engine) -> None:
        """Comes back when the next request ends, unless the set of running ones changes before."""
        generator.num_changes += 1
        change = generator.num_changes

        def end() -> None:
            if generator.num_changes == change:
                self._end(generator)

        if generator.running:
            self._at(self.now + generator.seconds_to_next_end(), end)

    def _end(self, generator: Engine) -> None:
        generator.book(self.now)
        for key in generator.ended():
            request = generator.running.pop(key)
            versions = generator.sampled(request)
            values, counts = np.unique(versions, return_counts=True)
            by_version = dict(zip(values.tolist(), counts.tolist(), strict=True))
            self._counts[key[0], key[1]] = (request.lease.prompt_id, by_version)
            self.result.generated_tokens += request.length
            self.result.slot_seconds += self.now - request.since
            scored = _scored(request, versions, generator, self.now)
            self._at(self._when_scored(), lambda scored=scored: self._send(self.rewardd, *scored))  # type: ignore[misc]
        self._await_end(generator)
        self._ask_lease(generator)

    def _when_scored(self) -> float:
        """The answer goes to the daemon that is free first."""
        if not self.setup.rewardd_answers_per_s:
            return self.now
        first = min(range(len(self._rewardd_free)), key=self._rewardd_free.__getitem__)
        self._rewardd_free[first] = max(self.now, self._rewardd_free[first]) + 1.0 / self.setup.rewardd_answers_per_s
        return self._rewardd_free[first]

    def _beat(self, generator: Engine) -> None:
        generator.book(self.now)
        progress = [
            m.SlotProgress(group_id=g, slot=s, attempt=a, num_tokens=len(generator.sampled(request)))
            for (g, s, a), request in generator.running.items()
        ]
        beat = m.Heartbeat(state="serving", policy_version=generator.version, progress=progress)

        def take(ack: m.HeartbeatAck, arrays: dict[str, NDArray[np.generic]]) -> None:
            for ref in ack.cancel:
                self._hand_back(generator, (ref.group_id, ref.slot, ref.attempt))

        self._send(generator.key, beat, then=take)
        self._at(self.now + self.setup.heartbeat_s, lambda: self._beat(generator))

    def _hand_back(self, generator: Engine, key: tuple[int, int, int]) -> None:
        generator.book(self.now)
        request = generator.running.pop(key, None)
        if request is None:
            return
        versions = generator.sampled(request)
        self._await_end(generator)
        prefix = f"partial/{key[0]}/{key[1]}/"
        arrays: dict[str, NDArray[Any]] = {
            prefix + "token_ids": np.full(len(versions), 2, "<i4"),
            prefix + "logp_behaviour": np.zeros(len(versions), "<f4"),
            prefix + "versions": versions,
            prefix + "loss_mask": np.ones(len(versions), "|u1"),
        }
        partial = m.PartialAnswer(group_id=key[0], slot=key[1], num_tokens=len(versions))
        body = m.HandBack(group_id=key[0], attempt=key[2], slots=[key[1]], partial=[partial], reason="cancelled")
        self._send(generator.key, body, arrays)
        self._ask_lease(generator)

    # ------------------------------------------------------------ trainer

    def _ask_batch(self, after: int) -> None:
        begun = self.now

        def take(answer: m.AnyBody, arrays: dict[str, NDArray[np.generic]]) -> None:
            if isinstance(answer, m.BatchPlan):
                self._train(answer)
            elif self.coordinator.facts.state == "running":
                self._at(self.now, lambda: self._ask_batch(after))

        request = m.BatchRequest(after_batch_id=after, policy_version=after, wait_s=1e9)
        self._send(self.trainer, request, then=take)
        assert begun == self.now

    def _train(self, plan: m.BatchPlan) -> None:
        tokens = sum(item.num_prompt_tokens + item.num_response_tokens for item in plan.items)
        seconds = tokens / self.setup.train_tokens_per_s
        self._train_s += seconds
        self._at(self.now + seconds, lambda: self._end_batch(plan, seconds))

    def _end_batch(self, plan: m.BatchPlan, seconds: float) -> None:
        trained = masked = 0
        for item in plan.items:
            prompt_id, by_version = self._counts.pop((item.group_id, item.slot))
            decile = self._decile(self._lengths[prompt_id, item.slot])
            for version, number in by_version.items():
                age = plan.policy_version - version
                if age > self.setup.max_staleness:
                    masked += number
                    continue
                trained += number
                self._trained[decile] += number
                self.result.max_trained_staleness = max(self.result.max_trained_staleness, age)
        self.result.trained_tokens += trained
        self.result.masked_tokens += masked
        self.result.num_batches += 1
        self.result.batches.append((self.now, seconds))
        version = plan.policy_version + 1
        report = m.BatchTrained(
            batch_id=plan.batch_id,
            attempt=1,
            policy_version=version,
            num_applied=1,
            num_skipped=0,
            replayed=False,
            num_trained_tokens=trained,
            num_stale_tokens=masked,
            max_token_staleness=0,
        )
        self._send(self.trainer, report)
        self._at(self.now + self.setup.between_s, lambda: self._ask_batch(plan.batch_id))
        self._at(self.now + self.setup.publish_s, lambda: self._publish(version))

    def _publish(self, version: int) -> None:
        for generator in self.generators:
            if version > generator.version:
                generator.book(self.now)
                generator.take_over(version)
        body = m.VersionPublished(policy_version=version, epoch=1, generators=[], seconds=self.setup.publish_s)
        self._send(self.trainer, body)

    # ------------------------------------------------------------ figures

    def _decile(self, length: int) -> int:
        return int(np.searchsorted(self._edges, length, side="right"))

    def _stop_counting_idle(self) -> None:
        """The last prompt is drawn: from here on slots run empty because there is no work."""
        self._over_at = self.now
        for generator in self.generators:
            generator.book(self.now)
            self.result.idle.append(generator.idle_s / self.now)
            self.result.slots_empty.append(generator.empty_s / self.now)

    def _finish(self) -> None:
        result = self.result
        result.seconds = self.now
        result.ledger = self.coordinator.ledger.database_summary()
        result.num_moved_slots = self._store.counters["moved_slots"]
        result.lost_tokens = result.generated_tokens - result.trained_tokens - result.masked_tokens
        result.trainer_idle = 1.0 - self._train_s / self.now if self.now > 0.0 else 0.0
        result.drawn_share = _shares(self._drawn)
        result.trained_share = _shares(self._trained)


def _shares(tokens: dict[int, int]) -> list[float]:
    total = max(1, sum(tokens.values()))
    return [tokens.get(decile, 0) / total for decile in range(10)]


def _scored(
    request: Request, versions: NDArray[np.int32], generator: Engine, now: float
) -> tuple[m.ScoredTrajectory, dict[str, NDArray[Any]]]:
    lease, length = request.lease, request.length
    trajectory = m.Trajectory(
        group_id=lease.group_id,
        slot=request.slot,
        attempt=lease.attempt,
        prompt_id=lease.prompt_id,
        generator=generator.key,
        purpose=lease.purpose,
        stage=lease.stage,
        num_prompt_tokens=PROMPT_TOKENS,
        num_response_tokens=length,
        finish_reason="stop",
        stop_reason="",
        sampling=lease.sampling,
        response_text="",
        tokenizer_hash="",
        seconds=now - request.since,
    )
    verdict = m.Verdict(
        kind="correct" if request.slot % 2 else "wrong",
        score=float(request.slot % 2),
        reason="simulated",
        scorer="simulated",
        elapsed_ms=0.0,
    )
    arrays: dict[str, NDArray[Any]] = {
        "token_ids": np.concatenate([np.full(PROMPT_TOKENS, 3, "<i4"), np.full(length, 2, "<i4")]),
        "logp_behaviour": np.zeros(length, "<f4"),
        "versions": versions,
        "loss_mask": np.ones(length, "|u1"),
    }
    return m.ScoredTrajectory(trajectory=trajectory, verdict=verdict, rewardd="r"), arrays
