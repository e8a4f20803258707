"""Putting the report folder together: RUN_DIR/report/."""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from deploy.report.curves import curve_images
from deploy.report.events import write_events
from deploy.report.html import render
from deploy.report.records import REPORT, TIMELINE, Comparison, comparisons, read_jsonl, surviving, table_lines
from deploy.report.trajectories import sample_answers, write_trajectories
from learner.advice import FEWEST_BATCHES, advise, means
from learner.coordinator.schema import ledger_summary
from protocol.config.load import EFFECTIVE_NAME, load_config
from protocol.errors import UserError
from protocol.logs import event

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """A written report."""

    path: Path
    rows: list[Comparison]
    summary: dict[str, Any]

    def advice_lines(self) -> list[str]:
        """What the figures of the run's second half say about its settings."""
        return [f"advice   {found['text']}" for found in self.summary["advice"]]

    def table_lines(self) -> list[str]:
        """The before/after table as text."""
        return table_lines(self.rows)


def build_report(run_dir: Path, *, measured: Mapping[str, Any] | None = None) -> Report:
    """Write report.html, summary.json, metrics.jsonl, tensorboard/, trajectories.parquet and a link to export/.

    Args:
        run_dir: folder of a run whose coordinator is not running.
        measured: figures of this machine to record (wall time, peak memory, restarts).

    Raises:
        UserError: the folder holds no run, or nothing was trained yet.
    """
    if not (run_dir / EFFECTIVE_NAME).is_file():
        raise UserError(f"{run_dir} is no run folder: it holds no {EFFECTIVE_NAME}")
    config = load_config(run_dir / EFFECTIVE_NAME).config
    metrics = surviving(read_jsonl(run_dir / "metrics.jsonl"))
    evaluations = read_jsonl(run_dir / "eval.jsonl")
    if not metrics and not evaluations:
        raise UserError(f"{run_dir} has no records yet: nothing was trained or evaluated")
    folder = run_dir / REPORT
    folder.mkdir(parents=True, exist_ok=True)
    rows = comparisons(evaluations)
    timeline = read_jsonl(run_dir / TIMELINE)
    _keep_measured(folder, measured)
    shutil.copyfile(run_dir / "metrics.jsonl", folder / "metrics.jsonl")
    facts = _facts(run_dir, metrics, timeline, _measured(folder))
    facts["num_trajectories"] = write_trajectories(run_dir, folder / "trajectories.parquet")
    try:
        facts["num_tensorboard_scalars"] = write_events(
            folder / "tensorboard", metrics=metrics, evaluations=evaluations
        )
    except ImportError:
        event(log, logging.WARNING, "no TensorBoard events: tensorboard is not installed")
    facts["export"] = _link_export(run_dir, folder)
    steady = metrics[len(metrics) // 2 :] if len(metrics) >= 2 * FEWEST_BATCHES else metrics
    advice = [msgspec.to_builtins(found) for found in advise(means(steady), config)]
    summary = {**facts, "evaluation": [_row(row) for row in rows], "advice": advice}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    answers = sample_answers(run_dir, tokenizer_folder=Path(config.model.tokenizer_path or config.model.path))
    page = folder / "report.html"
    page.write_text(
        render(
            title=f"Slipstream run {config.run.name}",
            rows=rows,
            facts={key: value for key, value in facts.items() if not isinstance(value, dict)},
            advice=[found["text"] for found in summary["advice"]],
            images=curve_images(metrics, timeline),
            answers=answers,
            config=(run_dir / EFFECTIVE_NAME).read_text(),
        )
    )
    return Report(path=page, rows=rows, summary=summary)


def _keep_measured(folder: Path, measured: Mapping[str, Any] | None) -> None:
    if measured is not None:
        (folder / "measured.json").write_text(json.dumps(measured))


def _measured(folder: Path) -> dict[str, Any]:
    path = folder / "measured.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _facts(
    run_dir: Path, metrics: list[dict[str, Any]], timeline: list[dict[str, Any]], measured: dict[str, Any]
) -> dict[str, Any]:
    facts: dict[str, Any] = dict(measured)
    facts["num_updates"] = len(metrics)
    facts["policy_version"] = metrics[-1]["policy_version"] if metrics else 0
    for name, key in (("first_reward_mean", 0), ("last_reward_mean", -1)):
        if metrics and "rollout/reward_mean" in metrics[key]:
            facts[name] = metrics[key]["rollout/reward_mean"]
    busy = [point for point in timeline if point.get("state") == "running" and point.get("num_updates", 0) > 0]
    for name in ("generated_tokens_per_s", "idle/trainer", "idle/generators"):
        values = [point[name] for point in busy if name in point]
        if values:
            facts[f"mean {name}"] = sum(values) / len(values)
    staleness: dict[str, int] = next((p["staleness"] for p in reversed(timeline) if p.get("staleness")), {})
    facts["staleness"] = staleness
    facts["staleness of trained tokens"] = ", ".join(f"{age}: {count}" for age, count in staleness.items())
    facts["ledger"] = ledger_summary(run_dir / "coordinator" / "ledger.sqlite")
    facts["ledger balanced"] = bool(facts["ledger"]["balanced"])
    return facts


def _link_export(run_dir: Path, folder: Path) -> str:
    """Make report/export point at the exported model; returns what there is."""
    link = folder / "export"
    if not (run_dir / "export" / "config.json").is_file():
        return "not written by the trainer"
    if link.is_symlink():
        link.unlink()
    if not link.exists():
        link.symlink_to(os.path.relpath(run_dir / "export", folder), target_is_directory=True)
    return "export/"


def _row(row: Comparison) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "num_prompts": row.num_prompts,
        "before": row.before,
        "before_standard_error": row.before_se,
        "after": row.after,
        "after_standard_error": row.after_se,
        "difference": row.difference,
        "difference_in_standard_errors": row.standard_errors,
    }
