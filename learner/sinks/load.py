"""Finding sinks by name and feeding them: the built-in ones, and entry points of `slipstream.metric_sinks`."""

import importlib
import logging
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Any

from learner.sinks.base import SinkContext, SinkRecord
from learner.sinks.outlet import Factory, Outlet
from protocol.config import Config
from protocol.config.checks import Finding, error
from protocol.logs import event

log = logging.getLogger(__name__)

GROUP = "slipstream.metric_sinks"
BUILT_IN = {
    "tensorboard": "learner.sinks.tensorboard:TensorBoardSink",
    "wandb": "learner.sinks.wandb:WandbSink",
    "trackio": "learner.sinks.trackio:TrackioSink",
}
NOT_VALUES = {"time", "batch_id", "policy_version", "replayed"}


def find_sink(name: str) -> Factory:
    """The factory of a sink.

    Raises:
        ValueError: no installed package offers it, or a package that it needs is missing; one line.
    """
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if name in BUILT_IN and name not in offered:
        module, _, attribute = BUILT_IN[name].partition(":")
        factory: Factory = getattr(importlib.import_module(module), attribute)
    elif name in offered:
        try:
            factory = offered[name].load()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{name} cannot be imported ({error}): mend its package, or take it out") from error
    else:
        known = ", ".join(sorted({*BUILT_IN, *offered}))
        raise ValueError(f"no package offers the metric sink {name}; there are {known}")
    missing = [package for package in getattr(factory, "requires", ()) if find_spec(package) is None]
    if missing:
        raise ValueError(f"{name} needs the package {missing[0]}: `pip install {missing[0]}`, or take it out")
    return factory


def check_sinks(config: Config) -> list[Finding]:
    """One error for each configured sink that cannot be used on this machine."""
    found = []
    for name in config.sinks.names:
        try:
            find_sink(name)
        except ValueError as problem:
            found.append(error("sinks.names", str(problem)))
    return found


def _installed(names: list[str]) -> dict[str, Factory]:
    factories: dict[str, Factory] = {}
    for name in names:
        try:
            factories[name] = find_sink(name)
        except ValueError as problem:
            event(log, logging.WARNING, "metric sink left out", sink=name, reason=str(problem))
    return factories


class Sinks:
    """All sinks of a run: `trained` and `evaluated` take lines of metrics.jsonl and eval.jsonl.

    A sink that is not installed is logged and left out: the run goes on (`slipstream check` refuses it before).
    """

    def __init__(self, config: Config, *, run_id: str) -> None:
        section = config.sinks
        factories = _installed(section.names)
        plain = config.model_dump(mode="json") if factories else {}
        self._close_s = section.close_s
        self._outlets = [
            Outlet(
                name,
                factory,
                SinkContext(
                    run_name=config.run.name,
                    run_id=run_id,
                    folder=Path(config.run.dir),
                    config=plain,
                    options=section.options.get(name, {}),
                ),
                queue_records=section.queue_records,
            )
            for name, factory in factories.items()
        ]

    def close(self) -> None:
        """Lets the sinks write what they hold, for `sinks.close_s` at most."""
        end = monotonic() + self._close_s
        for outlet in self._outlets:
            outlet.close(deadline_s=end - monotonic())

    def trained(self, record: Mapping[str, Any]) -> None:
        """A batch was trained."""
        self._offer(record, {name: value for name, value in record.items() if name not in NOT_VALUES})

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """An evaluation is over."""
        name = f"eval/avg@{record['k']}" if record["kind"] == "avg@k" else f"eval/{record['kind']}"
        values = {name: record["mean"], f"{name}/standard_error": record.get("standard_error")}
        self._offer(record, values | {f"{name}/{source}": mean for source, mean in record["by_source"].items()})

    def metrics(self) -> dict[str, float]:
        """What became of the records, per sink."""
        found = {}
        for outlet in self._outlets:
            found[f"sinks/{outlet.name}/written"] = float(outlet.num_written)
            found[f"sinks/{outlet.name}/dropped"] = float(outlet.num_dropped)
        return found

    def _offer(self, record: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        numbers = {
            name: float(value) for name, value in values.items() if isinstance(value, int | float) and isfinite(value)
        }
        for outlet in self._outlets:
            outlet.offer(SinkRecord(int(record["policy_version"]), float(record["time"]), numbers))
