"""Reading what a run wrote down: metrics.jsonl, eval.jsonl, report/timeline.jsonl."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPORT = Path("report")
TIMELINE = REPORT / "timeline.jsonl"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All whole records of a JSON-lines file (none when it does not exist)."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            records.append(value)
    return records


def surviving(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The clean curve: per batch the record of the newest attempt, without batches that a later attempt abandoned.

    An attempt that resumed at batch b takes the place of every earlier record with batch_id >= b (B76).
    """
    kept: list[dict[str, Any]] = []
    for record in records:
        while kept and kept[-1]["batch_id"] >= record["batch_id"]:
            kept.pop()
        kept.append(record)
    return kept


@dataclass(frozen=True)
class Comparison:
    """One evaluation before and after training; means in [0, 1], standard errors likewise."""

    kind: str
    num_prompts: int
    before: float
    before_se: float
    after: float
    after_se: float
    version_before: int
    version_after: int

    @property
    def difference(self) -> float:
        """After minus before."""
        return self.after - self.before

    @property
    def standard_errors(self) -> float:
        """The difference in units of its standard error (inf when that is 0)."""
        error = math.hypot(self.before_se, self.after_se)
        if error == 0.0:
            return 0.0 if self.difference == 0.0 else math.copysign(math.inf, self.difference)
        return self.difference / error


def comparisons(evaluations: list[dict[str, Any]]) -> list[Comparison]:
    """First and last evaluation of each kind (kinds evaluated only once are left out)."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for record in evaluations:
        if record.get("mean") is not None:
            name = f"avg@{record['k']}" if record["kind"] == "avg@k" else record["kind"]
            kinds.setdefault(name, []).append(record)
    return [
        Comparison(
            kind=kind,
            num_prompts=records[-1]["num_prompts"],
            before=records[0]["mean"],
            before_se=records[0].get("standard_error") or 0.0,
            after=records[-1]["mean"],
            after_se=records[-1].get("standard_error") or 0.0,
            version_before=records[0]["policy_version"],
            version_after=records[-1]["policy_version"],
        )
        for kind, records in kinds.items()
        if len(records) > 1
    ]


def table_lines(rows: list[Comparison]) -> list[str]:
    """The before/after table as text."""
    if not rows:
        return ["no evaluation before and after"]
    lines = [
        f"{'held out':12} {'prompts':>7}  {'before':>15}  {'after':>15}  {'difference':>10}  {'in std. errors':>14}"
    ]
    for row in rows:
        before, after = f"{row.before:.3f} ± {row.before_se:.3f}", f"{row.after:.3f} ± {row.after_se:.3f}"
        lines.append(
            f"{row.kind:12} {row.num_prompts:7}  {before:>15}  {after:>15}  {row.difference:+10.3f}  "
            f"{row.standard_errors:+14.1f}"
        )
    return lines
