"""The Prometheus endpoint: numbered ports, current values, a taken port named."""

import socket
import urllib.request

import pytest

from protocol.endpoint import MetricsEndpoint
from protocol.errors import UserError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_values_are_served_at_the_port_of_the_instance() -> None:
    port = free_port()
    endpoint = MetricsEndpoint(port - 3, role="rewardd", name="rewardd-3", setting="rewardd.metrics_port")
    endpoint.values = {"rewardd/queue_depth": 7.0}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = 'slipstream_rewardd_queue_depth{name="rewardd-3",role="rewardd"} 7.0'
        assert text in answer.read().decode()
    with pytest.raises(UserError, match=rf"rewardd\.metrics_port: port {port}"):
        MetricsEndpoint(port, role="rewardd", name="rewardd", setting="rewardd.metrics_port")
    endpoint.close()


def test_port_0_is_off() -> None:
    endpoint = MetricsEndpoint(0, role="rewardd", name="rewardd-0", setting="rewardd.metrics_port")
    assert endpoint.port == 0
    endpoint.close()
