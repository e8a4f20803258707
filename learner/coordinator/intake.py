"""Scored trajectories come in: checked, counted once, journalled; complete groups are filtered or put in line."""

import logging
from collections import deque
from collections.abc import Mapping
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from learner.coordinator.alarms import Alarms
from learner.coordinator.facts import RunFacts
from learner.coordinator.journal import Journal
from learner.coordinator.ledger import Ledger
from learner.coordinator.prompts import PromptPool
from learner.coordinator.records import Answer, Group, Slot
from learner.coordinator.stages import SamplingRules
from learner.coordinator.status import Rates
from learner.coordinator.store import Store
from learner.coordinator.validation import DTYPES, count_versions, problem_of
from protocol.config import Config
from protocol.logs import event
from protocol.messages import ScoredTrajectory, Trajectory, TrajectoryAck, Verdict

log = logging.getLogger(__name__)
Arrays = Mapping[str, NDArray[np.generic]]
RECENT = 200
UNJUDGED_ALARM = 0.2


class Intake:
    """Decides on each ScoredTrajectory. `vocab_size` and `tokenizer_hash` are the tokenizer's."""

    def __init__(
        self,
        config: Config,
        *,
        store: Store,
        journal: Journal,
        ledger: Ledger,
        pool: PromptPool,
        facts: RunFacts,
        rules: SamplingRules,
        rates: Rates,
        alarms: Alarms,
        vocab_size: int,
        tokenizer_hash: str | None,
    ) -> None:
        self._default_filter = config.algorithm.filter_groups
        self._max_filtered = config.algorithm.max_filtered_in_a_row
        self._store = store
        self._journal = journal
        self._ledger = ledger
        self._pool = pool
        self._facts = facts
        self._rules = rules
        self._rates = rates
        self._alarms = alarms
        self._vocab_size = vocab_size
        self._tokenizer_hash = tokenizer_hash
        self._judged: deque[bool] = deque(maxlen=RECENT)

    def take(self, body: ScoredTrajectory, arrays: Arrays, *, now: float) -> TrajectoryAck:
        """The acknowledgement, to be sent after the commit. A slot counts one answer, whichever attempt made it."""
        trajectory = body.trajectory
        group = self._ledger.group(trajectory.group_id)
        slot = (
            group.slots[trajectory.slot] if group is not None and trajectory.slot in range(len(group.slots)) else None
        )
        if group is None or slot is None:
            return self._not_live(trajectory)
        if slot.state == "answered":
            return self._ack(trajectory, "duplicate")
        if not 1 <= trajectory.attempt <= slot.attempt:
            return self._ack(trajectory, "unknown", f"attempt {trajectory.attempt} was never leased")
        problem = self._problem(group, slot, trajectory, body.verdict, arrays)
        if problem:
            return self._refuse(slot, trajectory, problem, now)
        if body.verdict.kind in ("unjudged", "rejected"):
            return self._not_judged(slot, body, now)
        self._judged.append(True)
        self._accept(slot, body, arrays, now)
        if group.complete:
            self._complete(group)
        return self._ack(trajectory, "accepted")

    # ------------------------------------------------------------ refusals and repeats

    def _ack(self, trajectory: Trajectory, status: str, reason: str = "") -> TrajectoryAck:
        self._store.count(f"trajectories/{status}")
        return TrajectoryAck(
            group_id=trajectory.group_id,
            slot=trajectory.slot,
            attempt=trajectory.attempt,
            status=status,  # type: ignore[arg-type]
            reason=reason,
        )

    def _not_live(self, trajectory: Trajectory) -> TrajectoryAck:
        state = self._store.slot_state(trajectory.group_id, trajectory.slot)
        if state in ("trained", "filtered", "evaluated", "answered"):
            return self._ack(trajectory, "duplicate")
        return self._ack(trajectory, "unknown", "no such slot" if state is None else f"its group was {state}")

    def _problem(
        self, group: Group, slot: Slot, trajectory: Trajectory, verdict: Verdict, arrays: Arrays
    ) -> str | None:
        if trajectory.prompt_id != group.prompt_id or trajectory.purpose != group.purpose:
            return f"prompt: {trajectory.prompt_id} ({trajectory.purpose}) is not what was leased"
        if verdict.kind in ("correct", "partial", "wrong") and not isfinite(verdict.score):
            return f"score: {verdict.score} is not finite"
        sampling = self._rules.params(
            purpose=group.purpose,
            variant=group.variant,
            stage=group.stage,
            group_id=group.group_id,
            slot=slot.slot,
        )
        return problem_of(
            trajectory,
            arrays,
            prompt_token_ids=self._pool[group.prompt_id].token_ids,
            sampling=sampling,
            vocab_size=self._vocab_size,
            policy_version=self._facts.policy_version,
            tokenizer_hash=self._tokenizer_hash,
        )

    def _refuse(self, slot: Slot, trajectory: Trajectory, problem: str, now: float) -> TrajectoryAck:
        slug = problem.split(":")[0]
        self._store.count(f"refused/{slug}")
        event(
            log,
            logging.WARNING,
            "trajectory refused",
            generator=trajectory.generator,
            slot=f"{slot.group_id}/{slot.slot}",
            attempt=trajectory.attempt,
            problem=problem,
        )
        self._again(slot, trajectory, slug, now)
        return self._ack(trajectory, "refused", problem)

    def _not_judged(self, slot: Slot, body: ScoredTrajectory, now: float) -> TrajectoryAck:
        self._store.count(f"verdicts/{body.verdict.kind}")
        self._judged.append(False)
        share = 1.0 - sum(self._judged) / len(self._judged)
        text = f"{share:.0%} of the last {len(self._judged)} answers were not judged ({body.verdict.reason})"
        self._alarms.set("unjudged", text if share > UNJUDGED_ALARM and len(self._judged) >= 20 else "")
        self._again(slot, body.trajectory, body.verdict.kind, now)
        return self._ack(body.trajectory, "accepted", "not judged: the slot is leased again")

    def _again(self, slot: Slot, trajectory: Trajectory, failed: str, now: float) -> None:
        if slot.state == "leased" and trajectory.attempt == slot.attempt:
            self._ledger.release(slot, now=now, failed=failed, cancel=False)

    # ------------------------------------------------------------ acceptance

    def _accept(self, slot: Slot, body: ScoredTrajectory, arrays: Arrays, now: float) -> None:
        trajectory, verdict = body.trajectory, body.verdict
        if slot.state == "leased" and slot.attempt != trajectory.attempt:
            self._ledger.cancel_lease(slot)  # an earlier attempt finished first
        counts = count_versions(arrays["versions"], arrays["loss_mask"])
        answer = Answer(
            num_prompt_tokens=trajectory.num_prompt_tokens,
            num_response_tokens=trajectory.num_response_tokens,
            finish_reason=trajectory.finish_reason,
            score=verdict.score,
            verdict=verdict.kind,
            version_counts=counts,
            temperature=trajectory.sampling.temperature,
            seconds=trajectory.seconds,
            reason=verdict.reason,
            generator=trajectory.generator,
            components=verdict.components | {f"scorer/{key}": value for key, value in verdict.metrics.items()},
        )
        location = self._journal.append({name: arrays[name] for name in DTYPES})
        self._ledger.answer(slot, answer, location)
        self._store.count(f"verdicts/{verdict.kind}")
        self._rates.answered(sum(counts.values()), now=now)

    def _complete(self, group: Group) -> None:
        if group.purpose == "eval":
            self._ledger.end(group, "evaluated")
            return
        if self._rules.filter_groups(group.stage, self._default_filter) == "none":
            return
        answers = [slot.answer for slot in group.slots if slot.answer is not None]
        if len({answer.score for answer in answers}) > 1:
            self._store.put("filtered_in_a_row", 0)
            self._alarms.set("filtered", "")
            return
        in_a_row = int(self._store.get("filtered_in_a_row", 0))
        if in_a_row >= self._max_filtered:
            text = f"{in_a_row} groups in a row had equal rewards; groups are trained unfiltered until one has signal"
            self._alarms.set("filtered", text)
            return
        self._store.put("filtered_in_a_row", in_a_row + 1)
        self._pool.solved(group.prompt_id, fully=all(answer.verdict == "correct" for answer in answers))
        self._ledger.end(group, "filtered", "equal rewards")
