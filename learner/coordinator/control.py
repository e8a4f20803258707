"""The course of the run: when batches are ready, what a trained batch changes, evaluations, alarms, the end."""

import logging
import time
from collections import deque
from typing import Any

from learner.advice import advise, means
from learner.coordinator.alarms import Alarms
from learner.coordinator.assembly import Choice
from learner.coordinator.batches import BatchBook, staleness_counts
from learner.coordinator.evaluation import EvaluationDesk, Trigger
from learner.coordinator.facts import RunFacts
from learner.coordinator.fleet import FleetMeter
from learner.coordinator.ledger import Ledger
from learner.coordinator.members import Members
from learner.coordinator.metrics import RecordFile
from learner.coordinator.prompts import PromptPool
from learner.coordinator.stages import StageSchedule
from learner.coordinator.status import Rates, idle_shares, missing_roles, queues
from learner.coordinator.store import Store
from protocol.config import Config
from protocol.logs import event
from protocol.messages import (
    BatchNotReady,
    BatchPlan,
    BatchTrained,
    ControlRequest,
    Refused,
    StatusReply,
)

log = logging.getLogger(__name__)

ADVICE_BATCHES = 10
"""Advice is about the means of this many batches, the newest."""
SERIES = ("rollout/reward_mean", "rollout/response_tokens_mean", "staleness/token_mean", "actor/entropy")


class RunControl:
    """States of a run: running -> evaluating -> finished; stopped by an operator; paused inside of running."""

    def __init__(
        self,
        config: Config,
        *,
        store: Store,
        ledger: Ledger,
        pool: PromptPool,
        facts: RunFacts,
        book: BatchBook,
        evaluation: EvaluationDesk,
        members: Members,
        alarms: Alarms,
        rates: Rates,
        schedule: StageSchedule,
        metrics: RecordFile,
    ) -> None:
        self._config = config
        self._store = store
        self._ledger = ledger
        self._pool = pool
        self._facts = facts
        self._book = book
        self._evaluation = evaluation
        self._members = members
        self._alarms = alarms
        self._rates = rates
        self._schedule = schedule
        self._metrics = metrics
        self._records: list[dict[str, Any]] = []
        self._last_metrics: dict[str, float] = {}
        self._fleet = FleetMeter()
        self._recent: deque[dict[str, Any]] = deque(maxlen=ADVICE_BATCHES)

    def begin(self, *, now: float) -> None:
        """At the coordinator's start: a stopped run goes on; a lost record is written; version 0 is evaluated."""
        if self._facts.state == "stopped":
            self._facts.state = "running"
        record = self._store.get("last_record")
        if record is not None:
            written = self._metrics.last()
            if any(written.get(k) != record[k] for k in ("attempt", "batch_id")):
                self._records.append(record)
        wanted = self._config.evaluation.at_start and self._facts.last_batch == 0 and self._evaluation.possible
        if wanted and not self._evaluation.running and not self._evaluation.had("start"):
            self._evaluate("start", now=now)

    def _evaluate(self, trigger: Trigger, *, now: float) -> None:
        stage = self._schedule.at_update(self._facts.last_batch)
        self._evaluation.start(trigger, policy_version=self._facts.policy_version, stage=stage, now=now)

    # ------------------------------------------------------------ leases and batches

    def may_issue(self) -> str:
        """ "" when a new training group may be drawn, else what leasing waits for."""
        if self._facts.state != "running" or self._pool.exhausted:
            return "no_prompts"
        planned = self._ledger.num_batched > 0
        batches_left = self._config.run.max_updates - self._facts.last_batch - int(planned)
        if len(self._ledger.train) - self._ledger.num_batched >= batches_left * self._config.learner.groups_per_batch:
            return "no_prompts"
        return ""

    def next_batch(self, after_batch_id: int, *, now: float) -> BatchPlan | BatchNotReady | Refused:
        """The plan of the batch after `after_batch_id`: a journalled one, or a new one when its groups are ready."""
        last = self._facts.last_batch
        if after_batch_id > last:
            reason = f"batch {after_batch_id} was not reported as trained; the newest trained batch is {last}"
            return Refused(code="unknown_batch", reason=reason)
        row = self._book.row(after_batch_id + 1)
        if row is not None and self._facts.state in ("running", "evaluating"):
            return row.plan
        if self._facts.state == "finished":
            return BatchNotReady(waiting_for="finished", detail="all updates are done")
        if self._facts.state == "stopped":
            return BatchNotReady(waiting_for="stopped", detail="stopped by the operator")
        if self._facts.state == "evaluating":
            return BatchNotReady(waiting_for="evaluating", detail=self._evaluation_detail())
        if self._facts.paused:
            return BatchNotReady(waiting_for="paused", detail=self._facts.paused)
        if self._evaluation.trigger == "start":  # nothing may change the weights before version 0 is evaluated
            return BatchNotReady(waiting_for=self._missing() or "generation", detail=self._evaluation_detail())
        choice = self._book.choose(final=self._pool.exhausted)
        if not choice.groups:
            return self._not_ready(choice)
        return self._book.plan(choice.groups, now=now)

    def waiting_for(self) -> str:
        """What the run as a whole waits for now; "" while a batch is in training."""
        if self._facts.state != "running" or self._facts.paused:
            return self._facts.state if self._facts.state != "running" else "paused"
        if self._ledger.num_batched:
            return "" if self._members.of_role("trainer") else "trainer"
        choice = self._book.choose(final=self._pool.exhausted)
        if choice.groups:
            return "trainer"
        return self._not_ready(choice).waiting_for

    def _not_ready(self, choice: Choice) -> BatchNotReady:
        detail = f"{choice.num_complete} of {self._config.learner.groups_per_batch} groups are complete"
        if choice.held_by:
            detail += f"; the oldest not complete are {[group.group_id for group in choice.held_by[:4]]}"
        return BatchNotReady(waiting_for=self._missing() or "generation", detail=detail)

    def _missing(self) -> str:
        missing = missing_roles(self._members)
        return next((name for name in ("generators", "reward") if name in missing), "")

    def _evaluation_detail(self) -> str:
        left = sum(not group.complete for group in self._ledger.eval.values())
        return f"evaluation of version {self._evaluation.policy_version}: {left} groups are left"

    # ------------------------------------------------------------ a trained batch

    def trained(self, body: BatchTrained, *, now: float) -> bool:
        """Counts a trained batch; False when it was counted before. Raises ValueError for one never planned."""
        row = self._book.row(body.batch_id)
        answers = [
            slot.answer
            for group in self._ledger.train.values()
            if group.batch_id == body.batch_id
            for slot in group.slots
            if slot.answer is not None
        ]
        first = self._book.trained(body)
        assert row is not None
        if not first and row.attempt == body.attempt:
            return False
        metrics = row.plan.metrics | body.metrics
        record = self._record(body, row.plan, metrics)
        self._records.append(record)
        self._recent.append(record)
        self._store.put("last_record", record)
        if first:
            self._rates.trained(staleness_counts(answers, version=row.plan.policy_version))
            self._store.count("trained_tokens", body.num_trained_tokens)
            self._store.count("stale_tokens", body.num_stale_tokens)
            self._store.count("skipped_updates", int(body.num_applied == 0))
            self._after_update(metrics, now=now)
        self._last_metrics = metrics
        for name in SERIES:
            if name in metrics:
                self._rates.point(name, metrics[name])
        return first

    def _record(self, body: BatchTrained, plan: BatchPlan, metrics: dict[str, float]) -> dict[str, Any]:
        return {
            "time": time.time(),
            "attempt": body.attempt,
            "batch_id": body.batch_id,
            "policy_version": body.policy_version,
            "applied": body.num_applied,
            "skipped": body.num_skipped,
            "replayed": body.replayed,
            "stage": plan.stage,
            "trained_tokens": body.num_trained_tokens,
            "stale_tokens": body.num_stale_tokens,
            "max_token_staleness": body.max_token_staleness,
            "fill_fraction": plan.fill_fraction,
            **metrics,
            **self._fleet.take(),
        }

    def _after_update(self, metrics: dict[str, float], *, now: float) -> None:
        if self._schedule.observe(metrics):
            self._store.put("stage_reached", self._schedule.reached)
            event(log, logging.INFO, "stage begins early", stage=self._schedule.reached)
        raised = self._alarms.observe(metrics, update=self._facts.last_batch)
        self._store.put("alarm_state", self._alarms.state_dict())
        for text in raised:
            event(log, logging.ERROR, "alarm", alarm=text, action=self._config.alarms.action)
            if self._config.alarms.action == "pause":
                self._facts.paused = f"alarm: {text}"
            elif self._config.alarms.action == "stop":
                self._facts.state = "stopped"
        every = self._config.evaluation.every_updates
        due = every > 0 and self._facts.last_batch % every == 0
        if due and self._evaluation.possible and not self._evaluation.running and not self._is_over():
            self._evaluate("interval", now=now)

    # ------------------------------------------------------------ the end

    def _is_over(self) -> bool:
        return self._facts.last_batch >= self._config.run.max_updates or (
            self._pool.exhausted and not self._ledger.train
        )

    def advance(self, *, now: float) -> None:
        """Moves the run to its next state when it is time."""
        self._evaluation.finish()
        if self._facts.state == "running" and self._is_over():
            for group in list(self._ledger.train.values()):
                self._ledger.end(group, "retired", "run finished")
            if self._config.evaluation.at_end and self._evaluation.possible and not self._evaluation.running:
                self._evaluate("end", now=now)
            self._facts.state = "evaluating" if self._evaluation.running else "finished"
        elif self._facts.state == "evaluating" and not self._evaluation.running:
            if self._config.evaluation.at_end and not self._evaluation.had("end"):
                self._evaluate("end", now=now)
            else:
                self._facts.state = "finished"
                event(log, logging.INFO, "run finished", updates=self._facts.last_batch, **self._ledger.summary())

    def sweep(self, *, now: float) -> None:
        """Once a second: alarms about missing roles; prompts exhausted with too few groups for a last batch."""
        self._note_missing()
        self._fleet.observe(self._members)
        waiting = [group for group in self._ledger.train.values() if group.batch_id is None]
        if (
            self._pool.exhausted
            and 0 < len(waiting) < self._config.learner.mini_batches
            and all(g.complete for g in waiting)
        ):
            for group in waiting:
                self._ledger.end(group, "retired", "end of data: too few groups for a batch")

    def _note_missing(self) -> None:
        missing = missing_roles(self._members) if self._facts.state in ("running", "evaluating") else []
        for name in ("generators", "reward", "trainer"):
            self._alarms.set(f"missing_{name}", f"no live process of {name}" if name in missing else "")

    # ------------------------------------------------------------ operators

    def command(self, body: ControlRequest) -> str:
        """stop | pause | resume; returns one line for the operator."""
        if self._facts.state in ("finished", "stopped"):
            return f"the run is {self._facts.state} already"
        if body.command == "stop":
            self._facts.state = "stopped"
        elif body.command == "pause":
            self._facts.paused = body.reason or "by the operator"
        else:
            self._facts.paused = ""
        event(log, logging.WARNING, "operator", command=body.command, reason=body.reason)
        return {"stop": "stopping after the batch in training", "pause": "paused", "resume": "resumed"}[body.command]

    def status(self, *, now: float) -> StatusReply:
        """Everything `slipstream status` shows."""
        self._note_missing()
        live = self._members.of_role("trainer") + self._members.of_role("rewardd") + self._members.of_role("generator")
        histogram = {str(age): count for age, count in sorted(self._rates.staleness.items())}
        metrics = dict(self._last_metrics) | idle_shares(self._members)
        metrics["generated_tokens_per_s"] = self._rates.tokens_per_s(now=now)
        counters = {name: float(value) for name, value in self._store.counters.items()}
        metrics |= counters
        return StatusReply(
            run_id=self._facts.run_id,
            run_name=self._config.run.name,
            run_state="paused" if self._facts.paused and self._facts.state == "running" else self._facts.state,
            policy_version=self._facts.policy_version,
            published_version=self._facts.published_version,
            num_updates=self._facts.last_batch,
            max_updates=self._config.run.max_updates,
            roles=[member.status(now=now) for member in live] + list(self._members.gone.values()),
            queues=queues(self._ledger, now=now),
            staleness_histogram=histogram,
            metrics=metrics,
            ledger=self._ledger.summary(),
            alarms=list(self._alarms.active.values()),
            advice=advise(means(self._recent) | counters, self._config),
            series={name: list(points) for name, points in self._rates.series.items()},
        )

    def write_records(self) -> None:
        """Appends the records of committed batches to metrics.jsonl."""
        records, self._records = self._records, []
        for record in records:
            self._metrics.append(record)
