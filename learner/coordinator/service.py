"""The coordinator without sockets: messages in, messages out, a clock tick, a commit.

The shell gives every message that is there to `handle`, calls `tick`, then `commit`, and only then sends what
`take_outbox` returns: nothing is acknowledged before it is durable (crash at any instant keeps conservation).
"""

import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from learner.coordinator.alarms import Alarms
from learner.coordinator.assembly import overtaken
from learner.coordinator.batches import BatchBook
from learner.coordinator.control import RunControl
from learner.coordinator.evaluation import EvaluationDesk
from learner.coordinator.facts import RunFacts
from learner.coordinator.intake import Intake
from learner.coordinator.journal import Journal
from learner.coordinator.leases import LeaseDesk
from learner.coordinator.ledger import Ledger
from learner.coordinator.members import Member, Members
from learner.coordinator.metrics import RecordFile
from learner.coordinator.prompts import PromptPool
from learner.coordinator.resume import Resume
from learner.coordinator.stages import SamplingRules, StageSchedule
from learner.coordinator.status import Rates
from learner.coordinator.store import Store
from learner.data import PromptSet
from learner.data.tokenization import TokenizerFacts
from learner.packing import ModelShape
from protocol import messages as m
from protocol.config import Config
from protocol.errors import UserError
from protocol.idle import IdleClock
from protocol.logs import event

log = logging.getLogger(__name__)
Arrays = Mapping[str, NDArray[np.generic]]

MOVE_AT = 0.5
"""Slow leases of a group are moved once this share of a batch of younger groups is complete (at the end: at once)."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send after the commit. `peer` is a member's name."""

    peer: str
    body: m.AnyBody
    arrays: Arrays | None = None
    reply_to: int | None = None


@dataclass(slots=True)
class ParkedRequest:
    """A BatchRequest that waits for its batch until `deadline`."""

    peer: str
    msg_id: int
    request: m.BatchRequest
    deadline: float


class Coordinator:
    """All coordinator logic behind one message interface.

    Args:
        clock: seconds, monotonic; only differences matter.
        journal, store: already open; both are used by this object alone.
        incarnation: of this process start.
        figures: more metrics for the status, of what only the process has.
    """

    def __init__(
        self,
        config: Config,
        *,
        train: PromptSet,
        evaluation: PromptSet | None,
        tokenizer: TokenizerFacts,
        tokenizer_hash: str | None,
        shape: ModelShape | None,
        store: Store,
        journal: Journal,
        metrics: RecordFile,
        evaluations: RecordFile,
        clock: Callable[[], float],
        name: str = "coordinator",
        incarnation: str = "",
        figures: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.config = config
        self._figures = figures
        self.name = name
        self.incarnation = incarnation
        self._clock = clock
        self._store = store
        self._journal = journal
        now = clock()
        self._open_ledger(train, evaluation, now=now)
        schedule = StageSchedule(config.stages, reached=int(store.get("stage_reached", 0)))
        _check_lengths(config, schedule, train)
        rules = SamplingRules(
            sampling=config.sampling,
            evaluation=config.evaluation,
            run=config.run,
            schedule=schedule,
            stop_token_ids=tokenizer.stop_token_ids,
        )
        self._open_run(schedule, shape=shape, metrics=metrics, evaluations=evaluations)
        self._open_desks(rules, schedule, tokenizer=tokenizer, tokenizer_hash=tokenizer_hash, now=now)
        self._resume = Resume(config, store=store, book=self.book, facts=self.facts)
        self.idle = IdleClock()
        self._since = self._progress_at = now
        self._parked: list[ParkedRequest] = []
        self._outbox: list[Outgoing] = []
        self._needed_segments: list[int] | None = None
        self._next_sweep = now
        self._handlers = self._all_handlers()
        self.control.begin(now=now)

    # ------------------------------------------------------------ what it is made of

    def _open_ledger(self, train: PromptSet, evaluation: PromptSet | None, *, now: float) -> None:
        """What is known of the run, its groups and its prompts."""
        config, store = self.config, self._store
        self.facts = RunFacts(store)
        self.members = Members()
        self.rates = Rates()
        self.alarms = Alarms(config.alarms, state=store.get("alarm_state"))
        self.ledger = Ledger(
            store,
            now=now,
            max_attempts=config.coordinator.max_attempts,
            max_prompt_failures=config.data.max_prompt_failures,
            lease_deadline_s=config.coordinator.lease_deadline_s,
        )
        self.pool = PromptPool(config, store, train, evaluation, is_quarantined=self.ledger.is_quarantined)
        self._retire_unknown_prompts()

    def _shared(self) -> dict[str, Any]:
        return {"store": self._store, "ledger": self.ledger, "pool": self.pool}

    def _open_run(
        self, schedule: StageSchedule, *, shape: ModelShape | None, metrics: RecordFile, evaluations: RecordFile
    ) -> None:
        """Batches, evaluations, and the course of the run."""
        self.book = BatchBook(self.config, journal=self._journal, facts=self.facts, shape=shape, **self._shared())
        self.evaluation = EvaluationDesk(self.config.evaluation, records=evaluations, **self._shared())
        self.control = RunControl(
            self.config,
            facts=self.facts,
            book=self.book,
            evaluation=self.evaluation,
            members=self.members,
            alarms=self.alarms,
            rates=self.rates,
            schedule=schedule,
            metrics=metrics,
            **self._shared(),
        )

    def _open_desks(
        self,
        rules: SamplingRules,
        schedule: StageSchedule,
        *,
        tokenizer: TokenizerFacts,
        tokenizer_hash: str | None,
        now: float,
    ) -> None:
        """Where leases go out and answers come in."""
        self.desk = LeaseDesk(
            self.config,
            journal=self._journal,
            facts=self.facts,
            members=self.members,
            rules=rules,
            stage_of=schedule.at_update,
            may_issue=self.control.may_issue,
            eval_version=lambda: self.evaluation.policy_version,
            now=now,
            **self._shared(),
        )
        self._intake = Intake(
            self.config,
            journal=self._journal,
            facts=self.facts,
            rules=rules,
            rates=self.rates,
            alarms=self.alarms,
            vocab_size=tokenizer.vocab_size,
            tokenizer_hash=tokenizer_hash,
            **self._shared(),
        )

    def _all_handlers(self) -> dict[type, Callable[[Member, Any, Arrays, int], None]]:
        return {
            m.Heartbeat: self._on_heartbeat,
            m.LeaseRequest: self._on_lease_request,
            m.HandBack: self._on_hand_back,
            m.ScoredTrajectory: self._on_trajectory,
            m.GroundTruthRequest: self._on_ground_truth,
            m.ResumeRequest: self._on_resume,
            m.BatchRequest: self._on_batch_request,
            m.ShardRequest: self._on_shard_request,
            m.BatchTrained: self._on_batch_trained,
            m.CheckpointCommitted: self._on_checkpoint,
            m.VersionPublished: self._on_published,
            m.StatusRequest: self._on_status,
            m.ControlRequest: self._on_control,
        }

    def _retire_unknown_prompts(self) -> None:
        """Groups in flight whose prompt is no longer in the data (data.on_change = restart_pass)."""
        for group in [*self.ledger.train.values(), *self.ledger.eval.values()]:
            if group.prompt_id not in self.pool and group.batch_id is None:
                self.ledger.end(group, "retired", "data changed")

    # ------------------------------------------------------------ membership

    def accept(self, hello: m.Hello) -> m.Welcome | m.Refused:
        """Answers a hello that passed the server's own checks (versions, tokenizer, duplicate names)."""
        if hello.run_id is not None and hello.run_id != self.facts.run_id:
            return m.Refused(
                code="run_id",
                reason=f"{hello.role} {hello.name} belongs to run {hello.run_id}, this is {self.facts.run_id}: "
                "check coordinator.listen and run.dir",
            )
        now = self._clock()
        for other in self.members.of_role(hello.role):
            if other.name == hello.name and other.hello.incarnation != hello.incarnation:
                self.gone(other.key, orderly=False)
        self.members.join(hello, now=now)
        return m.Welcome(
            server=self.name,
            incarnation=self.incarnation,
            run_id=self.facts.run_id,
            policy_version=self.facts.policy_version,
            published_version=self.facts.published_version,
            rewardd=self.members.rewardd(),
            weights_address=self.members.weights_address(),
            run_state=self.facts.state,
        )

    def gone(self, key: str, *, orderly: bool) -> None:
        """A member (name/incarnation) left or fell silent: its leases are open again."""
        member = self.members.leave(key, now=self._clock())
        if member is None:
            return
        returned = self.desk.leave(member, now=self._clock(), orderly=orderly)
        self._parked = [p for p in self._parked if p.peer != member.name]
        event(log, logging.INFO, "member left", member=member.name, orderly=orderly, leases_returned=returned)

    # ------------------------------------------------------------ messages, time, commit

    def handle(self, key: str, body: m.AnyBody, arrays: Arrays, *, msg_id: int) -> None:
        """Takes one message of the member `key` (name/incarnation)."""
        member = self.members.get(key)
        if member is None:
            return
        if isinstance(body, m.Goodbye):
            self.gone(key, orderly=True)
            return
        handler = self._handlers.get(type(body))
        if handler is None:
            self._store.count("refused/unexpected_message")
            reason = f"the coordinator does not take {type(body).__name__}"
            self._reply(member, m.Refused(code="unexpected_message", reason=reason), msg_id)
            return
        handler(member, body, arrays, msg_id)

    def tick(self) -> None:
        """What time brings: expired leases, moved slots, batches that are ready, the end of the run."""
        now = self._clock()
        if now >= self._next_sweep:
            self._next_sweep = now + min(1.0, self.config.transport.heartbeat_s)
            for text in self.desk.expire(now=now):
                event(log, logging.WARNING, "lease expired", lease=text)
            limit = 0.0 if self.control.may_issue() else MOVE_AT * self.config.learner.groups_per_batch
            self.desk.recall_slow(overtaken(self.ledger.train.values(), by=limit), now=now)
            self.control.sweep(now=now)
        self.control.advance(now=now)
        self._answer_parked(now)

    def commit(self) -> None:
        """Makes everything handled so far durable: one sync of the journal, one transaction."""
        if self._store.dirty:
            self._journal.sync()
            self._store.commit()
        if self._needed_segments is not None:
            if not self.config.coordinator.journal_keep_all:
                deleted = self._journal.delete_except(self._needed_segments)
                event(log, logging.INFO, "journal segments deleted", deleted=len(deleted))
            self._needed_segments = None
        self.control.write_records()

    def take_outbox(self) -> list[Outgoing]:
        """Messages to send now. Only to be called after `commit`."""
        assert not self._store.dirty, "acknowledgements must wait for the commit"
        outbox, self._outbox = self._outbox, []
        return outbox

    def status(self) -> m.StatusReply:
        """Everything `slipstream status` shows, this process included."""
        now = self._clock()
        status = self.control.status(now=now)
        own = m.RoleStatus(
            role="coordinator",
            name=self.name,
            state=status.run_state,
            since=self._since,
            version=status.policy_version,
            progress_age_s=max(0.0, now - self._progress_at),
            waiting_for=self.control.waiting_for(),
            idle_fractions=self.idle.fractions(),
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        status.roles.insert(0, own)
        status.metrics.update(self._figures())
        status.queues["journal_mb"] = self._journal.num_bytes() / 2**20
        return status

    def _reply(self, member: Member, body: m.AnyBody, msg_id: int, arrays: Arrays | None = None) -> None:
        self._outbox.append(Outgoing(member.name, body, arrays, msg_id))

    # ------------------------------------------------------------ generators and reward daemons

    def _on_heartbeat(self, member: Member, body: m.Heartbeat, arrays: Arrays, msg_id: int) -> None:
        now = self._clock()
        member.heard(body, now=now)
        if member.role == "generator":
            self.desk.progress(member, body, now=now)
        ack = m.HeartbeatAck(
            policy_version=self.facts.policy_version,
            published_version=self.facts.published_version,
            rewardd=self.members.rewardd(),
            weights_address=self.members.weights_address(),
            cancel=self.ledger.cancelled.pop(member.key, []),
            command="stop" if self.facts.state in ("finished", "stopped") else "",
            run_state=self.facts.state,
        )
        self._reply(member, ack, msg_id)

    def _on_lease_request(self, member: Member, body: m.LeaseRequest, arrays: Arrays, msg_id: int) -> None:
        grant = self.desk.grant(member, max_slots=body.max_slots, version=body.policy_version, now=self._clock())
        self._reply(member, grant.body, msg_id, grant.arrays)

    def _on_hand_back(self, member: Member, body: m.HandBack, arrays: Arrays, msg_id: int) -> None:
        counted = self.desk.hand_back(member, body, arrays, now=self._clock())
        self._reply(member, m.Ack(detail=counted), msg_id)

    def _on_trajectory(self, member: Member, body: m.ScoredTrajectory, arrays: Arrays, msg_id: int) -> None:
        self._progress_at = self._clock()
        self._reply(member, self._intake.take(body, arrays, now=self._progress_at), msg_id)

    def _on_ground_truth(self, member: Member, body: m.GroundTruthRequest, arrays: Arrays, msg_id: int) -> None:
        self._reply(member, m.GroundTruths(items=self.pool.ground_truths(body.prompt_ids)), msg_id)

    # ------------------------------------------------------------ trainer

    def _on_resume(self, member: Member, body: m.ResumeRequest, arrays: Arrays, msg_id: int) -> None:
        before = self.facts.last_batch
        answer = self._resume.plan(body, trainer=member.key)
        if self.facts.last_batch < before:
            self._forget_abandoned()
        self._parked.clear()
        self._reply(member, answer, msg_id)

    def _forget_abandoned(self) -> None:
        """Later steps were abandoned: generators with newer weights must load the resumed version first (B65)."""
        if self.evaluation.running:
            self.evaluation.abandon()
        for generator in self.members.of_role("generator"):
            if generator.version > self.facts.policy_version:
                generator.abandoned_version = generator.version

    def _on_batch_request(self, member: Member, body: m.BatchRequest, arrays: Arrays, msg_id: int) -> None:
        self._resume.note_batch_request()
        self._parked = [parked for parked in self._parked if parked.peer != member.name]
        self._parked.append(ParkedRequest(member.name, msg_id, body, self._clock() + body.wait_s))

    def _answer_parked(self, now: float) -> None:
        still: list[ParkedRequest] = []
        for parked in self._parked:
            answer = self.control.next_batch(parked.request.after_batch_id, now=now)
            if isinstance(answer, m.BatchPlan):
                answer = msgspec.structs.replace(answer, protected_batch_id=self.alarms.protected_batch)
            if isinstance(answer, m.BatchNotReady) and answer.waiting_for not in _FINAL and now < parked.deadline:
                still.append(parked)
            else:
                self._outbox.append(Outgoing(parked.peer, answer, None, parked.msg_id))
        self._parked = still

    def _on_shard_request(self, member: Member, body: m.ShardRequest, arrays: Arrays, msg_id: int) -> None:
        try:
            indices, shard = self.book.shard(body.batch_id, rank=body.rank, num_ranks=body.num_ranks)
        except (ValueError, RuntimeError) as error:
            self._reply(member, m.Refused(code="no_shard", reason=str(error)), msg_id)
            return
        self._reply(member, m.Shard(batch_id=body.batch_id, indices=indices), msg_id, shard)

    def _on_batch_trained(self, member: Member, body: m.BatchTrained, arrays: Arrays, msg_id: int) -> None:
        if body.attempt < self.facts.attempt:
            reason = f"attempt {body.attempt} is over, the trainer's newest start is attempt {self.facts.attempt}"
            self._reply(member, m.Refused(code="old_attempt", reason=reason), msg_id)
            return
        try:
            first = self.control.trained(body, now=self._clock())
        except ValueError as error:
            self._reply(member, m.Refused(code="unknown_batch", reason=str(error)), msg_id)
            return
        self._reply(member, m.Ack(detail="counted" if first else "counted before"), msg_id)

    def _on_checkpoint(self, member: Member, body: m.CheckpointCommitted, arrays: Arrays, msg_id: int) -> None:
        self._needed_segments = self.book.checkpoint(body.batch_id, body.policy_version, body.path, now=self._clock())
        self._reply(member, m.Ack(), msg_id)

    def _on_published(self, member: Member, body: m.VersionPublished, arrays: Arrays, msg_id: int) -> None:
        self.facts.published_version = max(self.facts.published_version, body.policy_version)
        self._reply(member, m.Ack(), msg_id)

    # ------------------------------------------------------------ operators

    def _on_status(self, member: Member, body: m.StatusRequest, arrays: Arrays, msg_id: int) -> None:
        self._reply(member, self.status(), msg_id)

    def _on_control(self, member: Member, body: m.ControlRequest, arrays: Arrays, msg_id: int) -> None:
        self._reply(member, m.Ack(detail=self.control.command(body)), msg_id)


def _check_lengths(config: Config, schedule: StageSchedule, train: PromptSet) -> None:
    """Raises UserError when the longest possible sequence does not fit into a micro-batch."""
    base = config.sampling.max_response_tokens
    longest = max(schedule.max_response_tokens(stage, base) for stage in range(len(config.stages) + 1))
    longest += max(len(prompt.token_ids) for prompt in train.prompts)
    cap = config.learner.micro_batch_tokens
    if longest > cap:
        raise UserError(
            f"the longest prompt and answer have {longest} tokens, a micro-batch holds {cap}; raise "
            f"learner.max_tokens_per_micro_batch to {longest} or lower sampling.max_response_tokens"
        )


_FINAL = ("finished", "stopped")
