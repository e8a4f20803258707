"""docs/metrics.md, from the table."""

from collections.abc import Iterable

from protocol.metrics.base import Metric
from protocol.metrics.registry import SECTIONS
from protocol.metrics.run import FAMILIES, RECORD_FIELDS

_INTRODUCTION = """# Metrics

Made by `slipstream config metrics`; the source is `protocol/metrics/`. A name with `<part>` stands for many.

Where they are: `RUN/metrics.jsonl` has one line per trained batch (policy update, off-policy correction, critic and
scores, batch, learner, answers); `slipstream status --json` has the newest of these, the state and counters of the run,
and each role's own metrics. Prometheus finds the figures of the run and of all roles at `coordinator.metrics_port`, and
those of one instance at `generators.metrics_port` + K, `rewardd.metrics_port` + K and `trainer.metrics_port`. The
Prometheus name is given where it isn't the name with `slipstream_` before it and `_` for `/`; figures of roles have the
labels `role` and `name`. A value that is missing was not to be had (its denominator was 0); a 0 was measured.
`slipstream dashboards --out DIR` writes alert rules, a scrape configuration and a Grafana dashboard;
[tuning](tuning.md) says which settings follow from which figures."""


def metrics_markdown() -> str:
    """The page."""
    out = [_INTRODUCTION, ""]
    for title, rows in SECTIONS.items():
        out += [f"## {title}", "", "| name | unit | meaning | normal | outside of it |", "|---|---|---|---|---|"]
        out += [_row((_named(row), row.unit, row.meaning, row.normal, row.action)) for row in rows]
        out.append("")
    out += ["## Prometheus only", "", "| family | labels | unit | meaning | normal | outside of it |"]
    out.append("|---|---|---|---|---|---|")
    for family in FAMILIES:
        labels = ", ".join(family.labels)
        out.append(_row((f"`{family.name}`", labels, family.unit, family.meaning, family.normal, family.action)))
    out += ["", "## Further fields of metrics.jsonl", "", "| field | meaning |", "|---|---|"]
    out += [_row((f"`{name}`", meaning)) for name, meaning in RECORD_FIELDS.items()]
    return "\n".join(out) + "\n"


def _named(metric: Metric) -> str:
    plain = "slipstream_" + metric.name.replace("/", "_")
    return f"`{metric.name}`" + ("" if metric.sample == plain else f"<br>`{metric.sample}`")


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
