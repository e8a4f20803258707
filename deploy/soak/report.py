"""What a soak found, and how it is judged: ledger against lineage, waits against deadlines, growth."""

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.soak.measure import Sample, slope_per_h
from learner.coordinator.schema import ledger_summary, open_database

JUDGED_MINUTES = 20.0
"""Shorter soaks report slopes of whatever lives they had, but noise rules them: they are not judged."""
JUDGED_LIFE_S = 240.0
WARM_UP_S = 60.0
MAX_RSS_SLOPE_MB_PER_H = 20.0
MAX_COUNT_SLOPE_PER_H = 10.0


@dataclass
class Report:
    """The outcome. Slopes are the largest of all roles, within lives of processes, warm-up left out.

    `drops` and `duplicates` count messages, `delays` spells of a slow, stalled or cut network. `trained_twice` counts
    slots that the surviving lineage trained more than once; `deadline_overruns` waits longer than their deadline.
    """

    minutes: float = 0.0
    kills: int = 0
    freezes: int = 0
    stops: int = 0
    drops: int = 0
    duplicates: int = 0
    delays: int = 0
    restarts: int = 0
    batches: int = 0
    conserved: bool = True
    trained_twice: int = 0
    deadline_overruns: int = 0
    crashes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    ledger: dict[str, int] = field(default_factory=dict)
    rss_slope_mb_per_h: float = 0.0
    fd_slope_per_h: float = 0.0
    thread_slope_per_h: float = 0.0
    slopes: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def is_flat(self) -> bool:
        """Memory, descriptors and threads do not grow; short soaks cannot tell."""
        if self.minutes < JUDGED_MINUTES:
            return True
        counts = max(self.fd_slope_per_h, self.thread_slope_per_h)
        return self.rss_slope_mb_per_h <= MAX_RSS_SLOPE_MB_PER_H and counts <= MAX_COUNT_SLOPE_PER_H

    @property
    def ok(self) -> bool:
        """Whether the system held."""
        failed = (self.trained_twice, self.deadline_overruns, self.crashes, self.problems)
        return self.conserved and self.is_flat and not any(failed)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self) | {"ok": self.ok}

    def overrun(self, text: str) -> None:
        """Notes a wait that lasted longer than its deadline."""
        self.deadline_overruns += 1
        self.problems.append(text)

    def check_ledger(self, path: Path, when: str) -> None:
        """Notes the conservation equation, and whether it does not hold."""
        summary = ledger_summary(path)
        self.ledger = {name: int(value) for name, value in summary.items()}
        if not summary["balanced"]:
            self.conserved = False
            self.problems.append(f"ledger out of balance {when}: {summary}")

    def check_lineage(self, path: Path, batches: list[dict[str, Any]]) -> None:
        """Compares the trainer's own account of what it trained, [{"batch_id", "slots"}], with the ledger."""
        with closing(open_database(path, read_only=True)) as database:
            query = "SELECT group_id, slot FROM slots WHERE state = 'trained' AND purpose = 'train'"
            counted = set(database.execute(query).fetchall())
            query = "SELECT pass, position FROM groups WHERE purpose = 'train' GROUP BY 1, 2 HAVING COUNT(*) > 1"
            drawn_twice = database.execute(query).fetchall()
        times = Counter((group, slot) for batch in batches for group, slot in batch["slots"])
        self.batches = len(batches)
        self.trained_twice = sum(n - 1 for n in times.values())
        if [batch["batch_id"] for batch in batches] != list(range(1, len(batches) + 1)):
            self.problems.append("the surviving lineage skips or repeats a batch")
        if set(times) != counted:
            self.conserved = False
            self.problems.append(f"{len(set(times) ^ counted)} slots trained by one side's account only")
        if drawn_twice:
            self.conserved = False
            self.problems.append(f"positions of a pass drawn twice: {drawn_twice[:5]}")

    def check_growth(self, samples: Iterable[Sample]) -> None:
        """Notes slopes by role and the largest of them; in long soaks those of long lives after their warm-up."""
        is_long = self.minutes >= JUDGED_MINUTES
        warm_up_s, min_life_s = (WARM_UP_S, JUDGED_LIFE_S) if is_long else (10.0, 0.0)
        by_role: dict[str, list[Sample]] = {}
        for sample in samples:
            by_role.setdefault(sample.name.split("-")[0], []).append(sample)
        for name in ("rss_mb", "num_fds", "num_threads"):
            self.slopes[name] = {
                role: round(slope_per_h(of_role, name, warm_up_s=warm_up_s, min_life_s=min_life_s), 3)
                for role, of_role in by_role.items()
            }
        largest = {name: max(slopes.values(), default=0.0) for name, slopes in self.slopes.items()}
        self.rss_slope_mb_per_h = largest["rss_mb"]
        self.fd_slope_per_h, self.thread_slope_per_h = largest["num_fds"], largest["num_threads"]

    def lines(self) -> list[str]:
        """For people."""
        figures = {name: value for name, value in asdict(self).items() if isinstance(value, int | float)}
        found = [*self.crashes, *self.problems]
        return [
            *(f"{name:>22} {value:g}" for name, value in figures.items()),
            f"{'ledger':>22} {json.dumps(self.ledger)}",
            *(f"{'PROBLEM':>22} {text}" for text in found),
            f"{'held':>22} {'yes' if self.ok else 'NO'}",
        ]
