"""Alert rules, scrape configuration and dashboard: every query uses metrics that exist; promtool agrees, if there."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.cli import run
from deploy.dashboards.alerts import ALERTS
from deploy.dashboards.grafana import dashboard
from deploy.dashboards.queries import scoped, used_metrics
from protocol.metrics import families

FOLDER = Path(__file__).parent
UNITS = {"short", "percentunit", "s", "decmbytes"}
POSITION = {
    "type": "object",
    "required": ["x", "y", "w", "h"],
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 23},
        "y": {"type": "integer", "minimum": 0},
        "w": {"type": "integer", "minimum": 1, "maximum": 24},
        "h": {"type": "integer", "minimum": 1},
    },
    "additionalProperties": False,
}
TARGET = {
    "type": "object",
    "required": ["refId", "expr", "datasource"],
    "properties": {"refId": {"pattern": "^[A-Z]$"}, "expr": {"type": "string", "minLength": 1}},
}
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos"],
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"enum": ["row", "timeseries"]},
        "title": {"type": "string", "minLength": 1},
        "gridPos": POSITION,
        "targets": {"type": "array", "minItems": 1, "items": TARGET},
        "fieldConfig": {
            "type": "object",
            "required": ["defaults", "overrides"],
            "properties": {"defaults": {"properties": {"unit": {"enum": sorted(UNITS)}}}},
        },
    },
    "if": {"properties": {"type": {"const": "timeseries"}}},
    "then": {"required": ["targets", "datasource", "fieldConfig", "options"]},
}
DASHBOARD = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "time", "templating", "panels", "annotations"],
    "properties": {
        "uid": {"pattern": "^[a-zA-Z0-9_-]{1,40}$"},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "panels": {"type": "array", "minItems": 10, "items": PANEL},
        "templating": {
            "properties": {
                "list": {
                    "items": {
                        "required": ["name", "type", "query"],
                        "properties": {"type": {"enum": ["query", "datasource"]}},
                    }
                }
            }
        },
        "time": {"type": "object", "required": ["from", "to"]},
    },
}
"""What Grafana's JSON model of a dashboard asks of the parts that are used here."""


@pytest.fixture
def written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert run(["dashboards", "--out", str(tmp_path / "out")]) == 0
    assert "coordinator.metrics_port" in capsys.readouterr().err
    return tmp_path / "out"


def test_the_dashboard_has_grafanas_shape_and_places_no_two_panels_on_one_another() -> None:
    board = dashboard()
    jsonschema.validate(board, DASHBOARD)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_every_query_uses_registered_metrics_and_labels() -> None:
    board = dashboard()
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries += [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    queries += [alert.expr for alert in ALERTS if alert.expr != "up == 0"]
    assert len(queries) > 50
    for query in queries:
        assert used_metrics(query), query
        assert used_metrics(query) <= families().keys(), query
    for alert in ALERTS:
        known = {label for name in used_metrics(alert.expr) for label in families()[name].labels}
        named = {word.split(" ")[0].rstrip("}") for word in alert.summary.split("$labels.")[1:]}
        assert named <= known | {"instance", "role", "name"}, alert.name


def test_queries_are_limited_to_coordinators() -> None:
    query = 'rate(slipstream_a[1h]) / on (instance) slipstream_b{role="trainer"}'
    expected = 'rate(slipstream_a{job="slipstream"}[1h]) / on (instance) slipstream_b{job="slipstream",role="trainer"}'
    assert scoped(query) == expected


def test_the_files_are_whole_and_name_one_another(written: Path) -> None:
    rules = yaml.safe_load((written / "alerts.yml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in ALERTS]
    assert all(rule["annotations"]["action"] for rule in rules)
    scrape = yaml.safe_load((written / "prometheus.yml").read_text())
    assert scrape["rule_files"] == ["alerts.yml"] and scrape["scrape_configs"][0]["job_name"] == "slipstream"
    assert json.loads((written / "grafana.json").read_text()) == dashboard()


def test_a_runs_own_ports_are_scraped(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    settings: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train_files": ["x.jsonl"]},
        "coordinator": {"metrics_port": 9500},
        "generators": {"metrics_port": 9510, "num": 2},
        "trainer": {"metrics_port": 9520},
    }
    path.write_text(yaml.safe_dump(settings))
    assert run(["dashboards", "--out", str(tmp_path), "--config", str(path)]) == 0
    jobs = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    assert targets == {
        "slipstream": ["127.0.0.1:9500"],
        "slipstream-roles": ["127.0.0.1:9520", "127.0.0.1:9510", "127.0.0.1:9511"],
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH (Debian: apt install prometheus)")
def test_promtool_accepts_the_rules_and_they_fire_when_they_should(written: Path) -> None:
    shutil.copy(FOLDER / "rules_test.yml", written)
    for arguments in (
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "rules_test.yml"],
    ):
        done = subprocess.run(["promtool", *arguments], cwd=written, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
