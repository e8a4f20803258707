"""The table of all metrics, and looking names up in it."""

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache

from protocol.metrics import learner, run, services
from protocol.metrics.base import Family, Metric

SECTIONS: Mapping[str, tuple[Metric, ...]] = {
    "Policy update": learner.POLICY,
    "Off-policy correction": learner.IMPORTANCE,
    "Critic and scores": learner.CRITIC,
    "Batch": learner.BATCH,
    "Learner": learner.LEARNER,
    "Supervised warm start": learner.SFT,
    "Answers": run.ROLLOUT,
    "All instances of a role": run.FLEET,
    "Evaluation": run.EVALUATION,
    "State of the run": run.STATUS,
    "Counters of the run": run.COUNTERS,
    "Generators": services.GENERATOR,
    "Trainer's heartbeat": services.TRAINER,
    "Reward daemons": services.REWARDD + services.LANES,
    "Metric sinks": services.SINKS,
}


@cache
def all_metrics() -> tuple[Metric, ...]:
    """Every row, in the order of the documentation."""
    return tuple(metric for section in SECTIONS.values() for metric in section)


@cache
def _by_name() -> dict[str, Metric]:
    return {metric.name: metric for metric in all_metrics() if not metric.labels}


@cache
def _patterns() -> tuple[Metric, ...]:
    """Rows with parts that vary, those with the longest fixed text first."""
    rows = [metric for metric in all_metrics() if metric.labels]
    return tuple(sorted(rows, key=lambda metric: -len(metric.pattern.pattern)))


@lru_cache(maxsize=4096)
def find(name: str) -> Metric | None:
    """The row of a name, or None when no row is about it."""
    exact = _by_name().get(name)
    return exact or next((metric for metric in _patterns() if metric.pattern.fullmatch(name)), None)


def unregistered(names: Iterable[str]) -> list[str]:
    """The names that are in no row, sorted."""
    return sorted(name for name in set(names) if find(name) is None)


def placed(name: str) -> tuple[Metric | Family, dict[str, str]]:
    """Where a value goes in Prometheus: its row (the family of unknown names if there is none) and its labels."""
    metric = find(name)
    if metric is None:
        return _other(), {"metric": name}
    match = metric.pattern.fullmatch(name)
    assert match is not None
    return metric, match.groupdict()


def families() -> dict[str, Metric | Family]:
    """Every sample name that Prometheus may see here, with its row."""
    rows: list[Metric | Family] = [*all_metrics(), *run.FAMILIES]
    return {row.sample: row for row in rows}


@cache
def _other() -> Family:
    return next(family for family in run.FAMILIES if family.labels == ("metric",))
