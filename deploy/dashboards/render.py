"""The files of `slipstream dashboards`."""

import json
from typing import Any

import yaml

from deploy.dashboards.alerts import alert_rules
from deploy.dashboards.grafana import dashboard
from deploy.dashboards.queries import JOB
from protocol.config import Config

DEFAULT_PORT = 9400
"""Where the scrape configuration expects the coordinator when no port is configured."""


def render_dashboards(config: Config | None) -> dict[str, str]:
    """File name to text: alert rules, scrape configuration, dashboard."""
    return {
        "alerts.yml": yaml.safe_dump(alert_rules(), sort_keys=False, width=120),
        "prometheus.yml": yaml.safe_dump(scrape_configuration(config), sort_keys=False, width=120),
        "grafana.json": json.dumps(dashboard(), indent=1) + "\n",
    }


def scrape_configuration(config: Config | None) -> dict[str, Any]:
    """Prometheus's own configuration: the coordinator, and the roles' own ports under a job of their own."""
    port = config.coordinator.metrics_port if config is not None else 0
    jobs = [_job(JOB, [f"127.0.0.1:{port or DEFAULT_PORT}"])]
    own = _own_ports(config) if config is not None else []
    if own:
        jobs.append(_job(f"{JOB}-roles", [f"127.0.0.1:{number}" for number in own]))
    return {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": jobs,
    }


def _own_ports(config: Config) -> list[int]:
    services = (
        (config.trainer.metrics_port, 1),
        (config.generators.metrics_port, config.generators.num),
        (config.rewardd.metrics_port, config.rewardd.num),
    )
    return [first + number for first, count in services if first for number in range(count)]


def _job(name: str, targets: list[str]) -> dict[str, Any]:
    return {"job_name": name, "static_configs": [{"targets": targets}]}
