"""Prometheus endpoint of the coordinator; a plain snapshot is taken once a second, scrapes never touch the loop."""

import re
import time
from collections.abc import Iterator
from types import TracebackType

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from learner.coordinator.service import Coordinator
from protocol.errors import UserError

_BAD = re.compile(r"[^a-zA-Z0-9_]")
INTERVAL_S = 1.0


class MetricsExporter(Collector):
    """Serves the numbers of `status` as gauges `slipstream_*` on `port` (0 = off) of the loopback address."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._values: dict[str, float] = {}
        self._next = 0.0

    def __enter__(self) -> "MetricsExporter":
        self._server = None
        if self._port:
            registry = CollectorRegistry()
            registry.register(self)
            try:
                self._server, self._thread = start_http_server(self._port, addr="127.0.0.1", registry=registry)
            except OSError as error:
                raise UserError(f"coordinator.metrics_port = {self._port} cannot be bound: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def update(self, coordinator: Coordinator) -> None:
        """Takes a new snapshot when the last one is older than a second."""
        now = time.monotonic()
        if self._server is None or now < self._next:
            return
        self._next = now + INTERVAL_S
        status = coordinator.status()
        values = {f"queue_{name}": value for name, value in status.queues.items()}
        values |= {f"ledger_{name}": float(value) for name, value in status.ledger.items()}
        values |= {f"staleness_tokens_{age}": float(count) for age, count in status.staleness_histogram.items()}
        values |= status.metrics
        values |= {"policy_version": status.policy_version, "published_version": status.published_version}
        values |= {"updates": status.num_updates, "alarms": len(status.alarms)}
        self._values = values

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called by scrapes, on another thread."""
        for name, value in self._values.items():
            yield GaugeMetricFamily("slipstream_" + _BAD.sub("_", name), f"{name}, as in status", value=value)
