"""Prometheus endpoint of a role: its newest figures, under the names of `protocol.metrics`; scrapes never touch its
loop."""

import re
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import NamedTuple, Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Exported
from prometheus_client.registry import Collector

from protocol.errors import UserError
from protocol.metrics import Family, Metric, placed


class Sample(NamedTuple):
    """One value of a row of the table, with labels in the order of `names`."""

    row: Metric | Family
    names: tuple[str, ...]
    labels: tuple[str, ...]
    value: float


def sample(row: Metric | Family, value: float, **labels: str) -> Sample:
    """A value with its labels."""
    return Sample(row, tuple(labels), tuple(labels.values()), value)


def samples(values: Mapping[str, float], **labels: str) -> Iterator[Sample]:
    """The values by their rows; `labels` are added to those that are in the names."""
    for name, value in values.items():
        row, own = placed(name)
        yield sample(row, value, **own, **labels)


def exported(found: Iterable[Sample]) -> list[Exported]:
    """Prometheus's families. A family has the labels of its first sample; samples with others, and a second one with
    the same labels, are left out: either would make the whole scrape fail."""
    families: dict[str, tuple[tuple[str, ...], Exported]] = {}
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for row, names, labels, value in found:
        if row.sample not in families:
            text = row.meaning + (f", {row.unit}" if row.unit not in ("", "1") else "")
            if isinstance(row, Metric) and row.counter:
                families[row.sample] = names, CounterMetricFamily(row.family, text, labels=names)
            else:
                families[row.sample] = names, GaugeMetricFamily(row.sample, text, labels=names)
        known, family = families[row.sample]
        if known == names and (row.sample, labels) not in seen:
            seen.add((row.sample, labels))
            family.add_metric(labels, value)  # type: ignore[attr-defined]
    return [family for _, family in families.values()]


class MetricsServer(Collector):
    """Serves `current` at a port (0 = off) of the loopback address; a context manager.

    Raises:
        UserError: the port cannot be bound.
    """

    def __init__(self, port: int, *, setting: str) -> None:
        self.current: list[Sample] = []
        self.port = port
        self._server = None
        if not port:
            return
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise UserError(f"{setting}: port {port} cannot be bound: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def collect(self) -> list[Exported]:  # type: ignore[override]
        """Called by scrapes, on another thread."""
        return exported(self.current)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class MetricsEndpoint:
    """Serves `values` of one instance of a role.

    Args:
        port: of the first instance of the role (0 = off); the instance NAME-K listens at port + K.
        name: of this instance.
        setting: dotted name of the setting, for messages.

    Raises:
        UserError: the port cannot be bound.
    """

    def __init__(self, port: int, *, role: str, name: str, setting: str) -> None:
        self._labels = {"role": role, "name": name}
        self._values: Mapping[str, float] = {}
        number = re.search(r"(\d+)$", name)
        self._server = MetricsServer(port and port + (int(number.group(1)) if number else 0), setting=setting)
        self.port = self._server.port

    @property
    def values(self) -> Mapping[str, float]:
        """The newest figures, by name."""
        return self._values

    @values.setter
    def values(self, values: Mapping[str, float]) -> None:
        self._values = values
        if self.port:
            self._server.current = list(samples(values, **self._labels))

    def close(self) -> None:
        self._server.close()
