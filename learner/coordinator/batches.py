"""Batches: assembled, planned, journalled, handed out shard by shard, counted as trained, and replayed.

A batch is `planned` once its plan is committed, `trained` once the trainer said so. The plan is kept as it was handed
out, so a trainer that resumes from an earlier checkpoint trains the same items in the same order again.
"""

import logging
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from learner.coordinator.assembly import Choice, choose_batch
from learner.coordinator.facts import RunFacts
from learner.coordinator.journal import Journal, JournalDamaged
from learner.coordinator.ledger import Ledger
from learner.coordinator.packing import plan_micro_batches
from learner.coordinator.prompts import PromptPool
from learner.coordinator.records import Answer, Group
from learner.coordinator.store import Store
from learner.packing import ModelShape
from protocol.config import Config
from protocol.logs import event
from protocol.messages import BatchItem, BatchPlan, BatchTrained

log = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BatchPlan)


@dataclass
class BatchRow:
    """A journalled batch."""

    plan: BatchPlan
    state: str
    attempt: int
    num_applied: int
    new_version: int


class BatchBook:
    """All batches of the surviving lineage. `num_ranks` (data-parallel ones) is what the running trainer said."""

    def __init__(
        self,
        config: Config,
        *,
        store: Store,
        journal: Journal,
        ledger: Ledger,
        pool: PromptPool,
        facts: RunFacts,
        shape: ModelShape | None,
    ) -> None:
        self._config = config
        self._store = store
        self._journal = journal
        self._ledger = ledger
        self._pool = pool
        self._facts = facts
        self._shape = shape
        self.num_ranks = config.trainer.num_ranks // config.learner.sequence_parallel

    # ------------------------------------------------------------ planning

    def choose(self, *, final: bool = False) -> Choice:
        """The groups of the next batch. `final`: no more groups will come, so a smaller last batch is fine."""
        size = self._config.learner.groups_per_batch
        if final:
            whole = sum(group.batch_id is None for group in self._ledger.train.values())
            size = max(1, min(size, whole - whole % self._config.learner.mini_batches))
        return choose_batch(
            self._ledger.train.values(),
            size=size,
            policy_version=self._facts.policy_version,
            max_staleness=self._config.algorithm.max_staleness,
        )

    def plan(self, groups: list[Group], *, now: float) -> BatchPlan:
        """Plans the next batch out of complete groups and journals it."""
        batch_id = self._facts.last_batch + 1
        items = [self._item(group, number) for group in groups for number in range(len(group.slots))]
        packing = self._pack(items, self.num_ranks)
        version = self._facts.policy_version
        oldest_age_s = now - min(group.created for group in groups)
        plan = BatchPlan(
            batch_id=batch_id,
            policy_version=version,
            stage=max(group.stage for group in groups),
            items=items,
            micro_batches=packing[0],
            fill_fraction=packing[1],
            oldest_age_s=oldest_age_s,
            metrics=batch_metrics(groups, version=version, max_staleness=self._config.algorithm.max_staleness)
            | {"packing/fill_fraction": packing[1], "packing/oldest_age_s": oldest_age_s},
        )
        for group in groups:
            self._ledger.put_in_batch(group, batch_id)
        self._store.execute(
            "INSERT INTO batches (batch_id, policy_version, plan, state) VALUES (?, ?, ?, 'planned')",
            (batch_id, version, _encoder.encode(plan)),
        )
        for group in groups:
            for number, slot in enumerate(group.slots):
                for sampled_at, count in slot.answer.version_counts.items() if slot.answer is not None else ():
                    self._store.execute(
                        "INSERT INTO sampled_tokens VALUES (?, ?, ?, ?, ?)",
                        (batch_id, group.group_id, number, sampled_at, count),
                    )
        return plan

    def _item(self, group: Group, number: int) -> BatchItem:
        answer = group.slots[number].answer
        assert answer is not None
        return BatchItem(
            group_id=group.group_id,
            slot=number,
            prompt_id=group.prompt_id,
            data_source=self._pool[group.prompt_id].data_source if group.prompt_id in self._pool else "unknown",
            num_prompt_tokens=answer.num_prompt_tokens,
            num_response_tokens=answer.num_response_tokens,
            score=answer.score,
            verdict=answer.verdict,
            finish_reason=answer.finish_reason,
            min_version=answer.min_version,
            max_version=answer.max_version,
            temperature=answer.temperature,
            stage=group.stage,
            components=answer.components,
        )

    def _pack(self, items: list[BatchItem], num_ranks: int) -> tuple[list[list[list[int]]], float]:
        plan = plan_micro_batches(
            [item.num_prompt_tokens + item.num_response_tokens for item in items],
            max_tokens=self._config.learner.micro_batch_tokens,
            num_ranks=num_ranks,
            shape=self._shape,
        )
        return [[list(micro_batch) for micro_batch in rank] for rank in plan.micro_batches], plan.fill_fraction

    # ------------------------------------------------------------ handing out

    def row(self, batch_id: int) -> BatchRow | None:
        """A journalled batch, packed for the ranks there are now."""
        found = self._store.connection.execute(
            "SELECT plan, state, attempt, num_applied, new_version FROM batches WHERE batch_id = ?", (batch_id,)
        ).fetchone()
        if found is None:
            return None
        plan = _decoder.decode(found[0])
        if len(plan.micro_batches) != self.num_ranks:
            micro_batches, fill = self._pack(plan.items, self.num_ranks)
            plan = msgspec.structs.replace(plan, micro_batches=micro_batches, fill_fraction=fill)
        return BatchRow(plan, *found[1:])

    def shard(self, batch_id: int, *, rank: int, num_ranks: int) -> tuple[list[int], dict[str, NDArray[np.generic]]]:
        """Item indices of a rank's micro-batches and their arrays, named `{index}/{array}`.

        Raises ValueError for a batch, rank or record that is not there.
        """
        if num_ranks != self.num_ranks or not 0 <= rank < num_ranks:
            raise ValueError(f"rank {rank} of {num_ranks} asked for a shard; the trainer has {self.num_ranks} ranks")
        row = self.row(batch_id)
        if row is None:
            raise ValueError(f"batch {batch_id} is not in the journal")
        indices = sorted(index for micro_batch in row.plan.micro_batches[rank] for index in micro_batch)
        arrays: dict[str, NDArray[np.generic]] = {}
        for index in indices:
            item = row.plan.items[index]
            location = self._store.location(item.group_id, item.slot)
            if location is None:
                raise ValueError(f"batch {batch_id}: the arrays of {item.group_id}/{item.slot} were deleted")
            for name, array in self._journal.read(location).items():
                arrays[f"{index}/{name}"] = array
        return indices, arrays

    # ------------------------------------------------------------ trained

    def trained(self, body: BatchTrained) -> bool:
        """Counts a batch as trained. False when it was counted before (a repeated message, or a replay)."""
        row = self.row(body.batch_id)
        if row is None:
            raise ValueError(f"batch {body.batch_id} was never planned in this run")
        first = row.state == "planned"
        self._store.execute(
            "UPDATE batches SET state = 'trained', attempt = ?, num_applied = ?, new_version = ? WHERE batch_id = ?",
            (body.attempt, body.num_applied, body.policy_version, body.batch_id),
        )
        for age, count in body.trained_ages.items():
            self._store.execute(
                "INSERT OR REPLACE INTO trained_tokens VALUES (?, ?, ?, ?)", (body.batch_id, body.attempt, age, count)
            )
        if first:
            self._end_groups(row.plan)
            self._facts.last_batch = max(self._facts.last_batch, body.batch_id)
            self._facts.policy_version = max(self._facts.policy_version, body.policy_version)
        return first

    def ages(self, batch_id: int) -> dict[int, int]:
        """Tokens of a planned batch by age, those beyond the staleness bound left out: what a trainer trains of it."""
        rows = self._store.connection.execute(
            "SELECT MAX(0, b.policy_version - t.version) AS age, SUM(t.num_tokens) FROM batches b "
            "JOIN sampled_tokens t USING (batch_id) WHERE b.batch_id = ? GROUP BY age HAVING age <= ?",
            (batch_id, self._config.algorithm.max_staleness),
        ).fetchall()
        return dict(rows)

    def _end_groups(self, plan: BatchPlan) -> None:
        for group_id in dict.fromkeys(item.group_id for item in plan.items):
            group = self._ledger.train.get(group_id)
            assert group is not None and group.batch_id == plan.batch_id, f"group {group_id} left its batch"
            answers = [slot.answer for slot in group.slots if slot.answer is not None]
            self._pool.solved(group.prompt_id, fully=all(answer.verdict == "correct" for answer in answers))
            self._ledger.end(group, "trained")

    # ------------------------------------------------------------ resuming

    def missing_for_replay(self, batch_ids: range) -> str:
        """ "" when all these batches can be trained again, else what is missing."""
        for batch_id in batch_ids:
            row = self.row(batch_id)
            if row is None:
                return f"batch {batch_id} is not in the journal"
            for item in row.plan.items:
                location = self._store.location(item.group_id, item.slot)
                if location is None:
                    return f"the arrays of batch {batch_id} were deleted"
                try:
                    self._journal.read(location)
                except JournalDamaged as error:
                    return str(error)
        return ""

    def abandon_after(self, batch_id: int) -> dict[str, int]:
        """Gives up everything after a batch, and all groups in flight; their prompts are drawn again (B65).

        Returns what was discarded: batches, groups, answers.
        """
        later = self._store.connection.execute(
            "SELECT batch_id FROM batches WHERE batch_id > ? ORDER BY batch_id", (batch_id,)
        ).fetchall()
        groups = list(self._ledger.train.values())
        answers = sum(group.num_answered for group in groups)
        for group in groups:
            self._pool.draw_again(group.prompt_id, pass_number=group.pass_number, position=group.position)
            self._ledger.end(group, "retired", "abandoned")
        rows = self._store.connection.execute(
            "SELECT group_id, prompt_id, pass, position, num_slots FROM groups "
            "WHERE batch_id > ? AND state = 'trained' AND purpose = 'train' ORDER BY group_id",
            (batch_id,),
        ).fetchall()
        for group_id, prompt_id, pass_number, position, num_slots in rows:
            self._pool.draw_again(prompt_id, pass_number=pass_number, position=position)
            self._ledger.ended["trained"] -= num_slots
            self._ledger.ended["retired"] += num_slots
            answers += num_slots
            self._store.execute(
                "UPDATE groups SET state = 'retired', reason = 'abandoned' WHERE group_id = ?", (group_id,)
            )
            self._store.execute("UPDATE slots SET state = 'retired' WHERE group_id = ?", (group_id,))
        for table in ("batches", "sampled_tokens", "trained_tokens", "checkpoints"):
            self._store.execute(f"DELETE FROM {table} WHERE batch_id > ?", (batch_id,))
        self._store.execute("UPDATE groups SET batch_id = NULL WHERE batch_id > ?", (batch_id,))
        discarded = {"batches": len(later), "groups": len(groups) + len(rows), "answers": answers}
        event(log, logging.WARNING, "later steps abandoned", resumed_batch=batch_id, **discarded)
        return discarded

    # ------------------------------------------------------------ deleting what no checkpoint needs

    def checkpoint(self, batch_id: int, policy_version: int, path: str, *, now: float) -> list[int]:
        """Records a committed checkpoint and returns the journal segments that are still needed.

        Arrays are kept for groups in flight and for batches after the oldest kept checkpoint; all with
        coordinator.journal_keep_all.
        """
        self._store.execute(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", (batch_id, policy_version, path, now)
        )
        kept = self._store.connection.execute(
            "SELECT batch_id FROM checkpoints ORDER BY batch_id DESC LIMIT ?", (self._config.learner.checkpoint.keep,)
        ).fetchall()
        oldest = kept[-1][0] if len(kept) == self._config.learner.checkpoint.keep else 0
        if not self._config.coordinator.journal_keep_all:
            self._store.execute(
                "DELETE FROM trajectories WHERE EXISTS (SELECT 1 FROM groups g WHERE "
                "g.group_id = trajectories.group_id AND g.purpose = 'train' AND g.state != 'in_flight' "
                "AND (g.batch_id IS NULL OR g.batch_id <= ?))",
                (oldest,),
            )
        rows = self._store.connection.execute(
            "SELECT DISTINCT segment FROM trajectories UNION SELECT DISTINCT segment FROM partials"
        ).fetchall()
        return [row[0] for row in rows]


def batch_metrics(groups: list[Group], *, version: int, max_staleness: int) -> dict[str, float]:
    """What a batch holds: rewards, lengths, staleness per token, all computed before training."""
    answers: list[Answer] = [slot.answer for group in groups for slot in group.slots if slot.answer is not None]
    scores = np.asarray([answer.score for answer in answers])
    lengths = np.asarray([answer.num_response_tokens for answer in answers])
    tokens = staleness_counts(answers, version=version)
    total = sum(tokens.values())
    per_group = [np.asarray([s.answer.score for s in g.slots if s.answer is not None]) for g in groups]
    return {
        "rollout/reward_mean": float(scores.mean()),
        "rollout/reward_std": float(scores.std()),
        "rollout/correct_fraction": float(np.mean([answer.verdict == "correct" for answer in answers])),
        "rollout/equal_reward_groups": float(np.mean([np.ptp(s) == 0.0 for s in per_group])),
        "rollout/response_tokens_mean": float(lengths.mean()),
        "rollout/response_tokens_max": float(lengths.max()),
        "rollout/truncated_fraction": float(np.mean([answer.finish_reason == "length" for answer in answers])),
        "staleness/token_mean": sum(age * count for age, count in tokens.items()) / total,
        "staleness/token_max": float(max(tokens)),
        "staleness/old_token_fraction": sum(n for age, n in tokens.items() if age > max_staleness) / total,
    } | component_means(answers)


def component_means(answers: list[Answer]) -> dict[str, float]:
    """Means of the parts of the reward (correctness, format, length) and of what scorers measure (scorer/...), each
    over the answers that have it."""
    values: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in answer.components.items():
            values.setdefault(name, []).append(value)
    return {f"rollout/component/{name}": float(np.mean(found)) for name, found in sorted(values.items())}


def staleness_counts(answers: list[Answer], *, version: int) -> dict[int, int]:
    """Sampled tokens by staleness (versions behind `version`)."""
    counts: dict[int, int] = {}
    for answer in answers:
        for sampled_at, count in answer.version_counts.items():
            counts[version - sampled_at] = counts.get(version - sampled_at, 0) + count
    return dict(sorted(counts.items()))
