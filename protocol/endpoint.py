"""Prometheus endpoint of a role: gauges from the last snapshot the role left, so that scrapes never touch its loop."""

import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from protocol.errors import UserError

_BAD = re.compile(r"[^a-zA-Z0-9_]")


class MetricsEndpoint(Collector):
    """Serves `values` as gauges `slipstream_*` on the loopback address.

    Args:
        port: of the first instance of the role (0 = off); the instance NAME-K listens at port + K.
        name: of this instance.
        setting: dotted name of the setting, for messages.

    Raises:
        UserError: the port cannot be bound.
    """

    def __init__(self, port: int, *, name: str, setting: str) -> None:
        self.values: Mapping[str, float] = {}
        self._server = None
        number = re.search(r"(\d+)$", name)
        self.port = port and port + (int(number.group(1)) if number else 0)
        if not port:
            return
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(self.port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise UserError(f"{setting}: port {self.port} cannot be bound: {error.strerror}") from error

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called by scrapes, on another thread."""
        for name, value in self.values.items():
            yield GaugeMetricFamily("slipstream_" + _BAD.sub("_", name), f"{name}, as in heartbeats", value=value)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
