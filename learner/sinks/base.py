"""What a metric sink is."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Option = str | int | float | bool


@dataclass(frozen=True)
class SinkContext:
    """What a sink may know of the run.

    Attributes:
        folder: run folder, which exists; a sink writes into a folder of its own name there.
        config: the effective configuration as plain values.
        options: `sinks.options` of this sink.
    """

    run_name: str
    run_id: str
    folder: Path
    config: Mapping[str, Any]
    options: Mapping[str, Option]


@dataclass(frozen=True)
class SinkRecord:
    """The metrics of one trained batch or one evaluation (names `eval/KIND`), by policy version.

    `time` is seconds since 1970. After a resume from an earlier checkpoint versions come again.
    """

    policy_version: int
    time: float
    values: Mapping[str, float]


class MetricSink(Protocol):
    """Made with a `SinkContext`, used and closed by one thread of its own; it may be slow, block or raise.

    A class may name the packages it needs in an attribute `requires`; `slipstream check` looks for them.
    """

    def write(self, record: SinkRecord) -> None:
        """Takes one record over."""

    def close(self) -> None:
        """Writes out what is held."""
