"""Held-out evaluation through the same generators and reward daemons: greedy and avg@k.

A round issues one greedy group of one slot and one group of k sampled slots per prompt. When all of them have ended,
one record per kind goes to eval.jsonl. Evaluation answers are never trained on.
"""

import logging
import time
from collections import defaultdict
from typing import Any, Literal

import msgspec
import numpy as np

from learner.coordinator.ledger import Ledger
from learner.coordinator.metrics import RecordFile
from learner.coordinator.prompts import PromptPool
from learner.coordinator.records import Answer
from learner.coordinator.store import Store
from protocol.config.run import EvaluationSection
from protocol.logs import event

log = logging.getLogger(__name__)
_decoder = msgspec.msgpack.Decoder(Answer)
Trigger = Literal["start", "interval", "end"]


class EvaluationDesk:
    """One round at a time; the round and its groups survive restarts."""

    def __init__(
        self, section: EvaluationSection, *, store: Store, ledger: Ledger, pool: PromptPool, records: RecordFile
    ) -> None:
        self._section = section
        self._store = store
        self._ledger = ledger
        self._pool = pool
        self._records = records
        row = store.connection.execute(
            "SELECT round, policy_version, trigger FROM evaluations WHERE state = 'running' ORDER BY round DESC"
        ).fetchone()
        self.round: int = row[0] if row else 0
        self.policy_version: int = row[1] if row else -1
        self.trigger: str = row[2] if row else ""

    @property
    def running(self) -> bool:
        return self.round > 0

    @property
    def possible(self) -> bool:
        """Whether there is anything to evaluate with."""
        return bool(self._pool.evaluation) and (self._section.greedy or self._section.samples > 0)

    def had(self, trigger: Trigger) -> bool:
        """Whether a round of this kind was begun before."""
        query = "SELECT 1 FROM evaluations WHERE trigger = ? LIMIT 1"
        return self._store.connection.execute(query, (trigger,)).fetchone() is not None

    def start(self, trigger: Trigger, *, policy_version: int, stage: int, now: float) -> None:
        """Begins a round with the weights of `policy_version` or newer and the lengths of `stage`."""
        assert self.possible and not self.running
        row = self._store.execute("SELECT COALESCE(MAX(round), 0) + 1 FROM evaluations").fetchone()
        self.round, self.policy_version, self.trigger = int(row[0]), policy_version, trigger
        self._store.execute(
            "INSERT INTO evaluations VALUES (?, ?, ?, 'running')", (self.round, policy_version, trigger)
        )
        for position, prompt in enumerate(self._pool.evaluation):
            kinds = [("greedy", 1)] * self._section.greedy + [("sampled", self._section.samples)]
            for variant, num_slots in kinds:
                self._ledger.issue(
                    prompt.prompt_id,
                    num_slots=num_slots,
                    pass_number=self.round,
                    position=position,
                    now=now,
                    stage=stage,
                    purpose="eval",
                    variant="greedy" if variant == "greedy" else "sampled",
                )
        event(log, logging.INFO, "evaluation begins", round=self.round, version=policy_version, trigger=trigger)

    def abandon(self) -> None:
        """Ends a running round without a result (its weights are of abandoned steps)."""
        for group in list(self._ledger.eval.values()):
            self._ledger.end(group, "retired", "abandoned")
        self._end_round("abandoned")

    def finish(self) -> list[dict[str, Any]]:
        """Ends the round when all its groups have; returns its records (none while it runs)."""
        if not self.running or self._ledger.eval:
            return []
        written = {(r.get("round"), r.get("kind")) for r in self._records.records()}
        records = [record for record in self._summaries() if (record["round"], record["kind"]) not in written]
        for record in records:
            self._records.append(record)
            event(log, logging.INFO, "evaluated", **{k: v for k, v in record.items() if k != "by_source"})
        self._end_round("done")
        return records

    def _end_round(self, state: str) -> None:
        self._store.execute("UPDATE evaluations SET state = ? WHERE round = ?", (state, self.round))
        self._store.execute(
            "DELETE FROM trajectories WHERE group_id IN "
            "(SELECT group_id FROM groups WHERE purpose = 'eval' AND pass = ?)",
            (self.round,),
        )
        self.round, self.policy_version, self.trigger = 0, -1, ""

    def _summaries(self) -> list[dict[str, Any]]:
        correct: dict[str, dict[str, list[float]]] = {"greedy": defaultdict(list), "sampled": defaultdict(list)}
        cut: dict[str, list[bool]] = defaultdict(list)
        rows = self._store.execute(
            "SELECT g.variant, g.prompt_id, t.facts FROM groups g JOIN trajectories t ON t.group_id = g.group_id "
            "WHERE g.purpose = 'eval' AND g.pass = ? AND g.state = 'evaluated' ORDER BY g.group_id, t.slot",
            (self.round,),
        )
        for variant, prompt_id, facts in rows:
            answer = _decoder.decode(facts)
            correct[variant][prompt_id].append(float(answer.verdict == "correct"))
            cut[variant].append(answer.finish_reason == "length")
        kinds = [("greedy", "greedy", 1)] * self._section.greedy
        kinds.append(("sampled", f"avg@{self._section.samples}", self._section.samples))
        return [self._record(kind, k, correct[variant], cut[variant]) for variant, kind, k in kinds]

    def _record(self, kind: str, k: int, by_prompt: dict[str, list[float]], cut: list[bool]) -> dict[str, Any]:
        means = {prompt_id: float(np.mean(values)) for prompt_id, values in by_prompt.items()}
        sources: dict[str, list[float]] = defaultdict(list)
        for prompt_id, mean in means.items():
            if prompt_id in self._pool:
                sources[self._pool[prompt_id].data_source].append(mean)
        values = np.asarray(list(means.values()))
        n = len(values)
        return {
            "time": time.time(),
            "policy_version": self.policy_version,
            "kind": "greedy" if kind == "greedy" else "avg@k",
            "num_prompts": n,
            "k": k,
            "mean": float(values.mean()) if n else None,
            "standard_error": float(values.std(ddof=1) / np.sqrt(n)) if n > 1 else None,
            "by_source": {source: float(np.mean(v)) for source, v in sources.items()},
            "truncated_fraction": float(np.mean(cut)) if cut else None,
            "num_left_out": len(self._pool.evaluation) - n,
            "trigger": self.trigger,
            "round": self.round,
        }
