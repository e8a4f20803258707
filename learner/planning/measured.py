"""A workload read from a run folder: rates from its ledger and its records."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from learner.coordinator.records import Answer
from learner.coordinator.schema import open_database
from learner.planning.fleet import Workload, calibrated
from protocol.config import Config
from protocol.errors import UserError

WARM_UP = 3
MAX_LENGTHS = 4096
MAX_BETWEEN_SHARE = 0.05
"""Of an update: what a learner took longer from one update to the next it spent waiting for a batch."""


@dataclass(frozen=True)
class Measured:
    """A run's workload, and what it took: seconds from update to update (median), the learner's idle share (time not
    in an update), and how many updates that is based on."""

    workload: Workload
    seconds_per_update: float
    learner_idle: float
    num_updates: int


def measure(run_dir: Path, config: Config, *, fixed_share: float, publish_s: float = 1.0) -> Measured:
    """Reads rates of the newest attempt, without its first updates.

    A generator's rate is the one that gives, simulated with the run's settings, what its slots sampled per second.

    Raises:
        UserError: the run is too short to say.
    """
    records = _records(run_dir / "metrics.jsonl")
    if len(records) <= WARM_UP + 1:
        raise UserError(f"{run_dir} has {len(records)} trained batches: at least {WARM_UP + 2} are needed to plan from")
    answers = _answers(run_dir / "coordinator" / "ledger.sqlite")
    timed = [answer for answer in answers if answer.seconds > 0.0]
    if not timed:
        raise UserError(f"{run_dir} keeps no trained answers: set coordinator.journal_keep_all to plan from a run")
    steady = records[WARM_UP:]
    periods = [b["time"] - a["time"] for a, b in pairwise(records[WARM_UP - 1 :])]
    updates = [record["perf/update_seconds"] for record in steady]
    between_s = float(np.quantile([period - update for period, update in zip(periods, updates, strict=True)], 0.25))
    slot_rate = sum(answer.num_response_tokens for answer in timed) / sum(answer.seconds for answer in timed)
    step = max(1, len(answers) // MAX_LENGTHS)
    workload = Workload(
        groups_per_batch=config.learner.groups_per_batch,
        group_size=config.learner.group_size,
        lengths=tuple(max(1, answer.num_response_tokens) for answer in answers[::step]),
        num_slots=config.generators.max_num_seqs,
        generator_tokens_per_s=slot_rate * config.generators.max_num_seqs,
        update_s=statistics.median(updates),
        fixed_share=fixed_share,
        prefill_steps=_prefill_steps(timed),
        between_s=min(max(0.0, between_s), MAX_BETWEEN_SHARE * statistics.median(updates)),
        publish_s=publish_s,
    )
    return Measured(
        workload=calibrated(
            workload,
            slot_tokens_per_s=slot_rate,
            num_generators=max(1, config.generators.num),
            max_staleness=config.algorithm.max_staleness,
        ),
        seconds_per_update=statistics.median(periods),
        learner_idle=max(0.0, 1.0 - sum(updates) / sum(periods)),
        num_updates=len(steady),
    )


def _prefill_steps(answers: Sequence[Answer]) -> float:
    """Seconds over tokens, fitted by a line: what it takes before the first token, in units of the slope."""
    tokens = np.asarray([answer.num_response_tokens for answer in answers], dtype=float)
    if np.ptp(tokens) == 0.0:
        return 0.0
    slope, start = np.polyfit(tokens, np.asarray([answer.seconds for answer in answers]), 1)
    return float(max(0.0, start / slope)) if slope > 0.0 else 0.0


def _records(path: Path) -> list[dict[str, float]]:
    try:
        lines = path.read_text().splitlines()
    except OSError as problem:
        raise UserError(
            f"{path} cannot be read: {problem.strerror}; name the folder of a run that trained"
        ) from problem
    records = [record for line in lines if line.endswith("}") and not (record := json.loads(line))["replayed"]]
    newest = max((record["attempt"] for record in records), default=0)
    return [record for record in records if record["attempt"] == newest]


def _answers(path: Path) -> list[Answer]:
    database = open_database(path, read_only=True)
    try:
        rows = database.execute(
            "SELECT facts FROM trajectories JOIN groups USING (group_id) "
            "WHERE purpose = 'train' ORDER BY group_id, slot"
        ).fetchall()
    finally:
        database.close()
    decoder = msgspec.msgpack.Decoder(Answer)
    return [decoder.decode(row[0]) for row in rows]
