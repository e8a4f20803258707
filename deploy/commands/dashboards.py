"""`dashboards`: what Prometheus and Grafana need to watch a run."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.commands.options import Overrides
from deploy.dashboards.render import DEFAULT_PORT, render_dashboards
from protocol.config.load import load_config


def register(app: typer.Typer) -> None:
    """Add `dashboards`."""
    app.command("dashboards")(dashboards)


def dashboards(
    out: Annotated[Path, typer.Option(help="Folder for alerts.yml, prometheus.yml and grafana.json.")],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The run to scrape; its ports are used.")
    ] = None,
) -> None:
    """Write alert rules, a scrape configuration and a Grafana dashboard."""
    loaded = load_config(config, overrides=overrides or []) if config is not None else None
    out.mkdir(parents=True, exist_ok=True)
    for name, text in render_dashboards(loaded.config if loaded is not None else None).items():
        (out / name).write_text(text)
        typer.echo(str(out / name))
    port = loaded.config.coordinator.metrics_port if loaded is not None else 0
    if not port:
        typer.echo(f"set coordinator.metrics_port={DEFAULT_PORT}: it is off, and prometheus.yml looks there", err=True)
