"""`check` and `config ...`: the configuration before and during a run."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.commands.options import ConfigOption, Overrides
from learner.sinks.load import check_sinks
from protocol.config.checks import check_config
from protocol.config.explain import explain, reference_markdown
from protocol.config.load import load_config
from protocol.config.machine import check_machine
from protocol.errors import ExitStatus
from protocol.metrics.page import metrics_markdown


def register(app: typer.Typer) -> None:
    """Add `check` and the `config` group."""
    app.command("check")(check)
    group = typer.Typer(help="Explain the configuration.", no_args_is_help=True)
    group.command("explain")(explain_key)
    group.command("reference")(reference)
    group.command("metrics")(metrics)
    app.add_typer(group, name="config")


def check(config: ConfigOption, overrides: Overrides = None) -> int:
    """Check a configuration and this machine against it; starts nothing."""
    loaded = load_config(config, overrides=overrides or [])
    findings = [*check_config(loaded), *check_machine(loaded.config), *check_sinks(loaded.config)]
    for finding in findings:
        typer.echo(str(finding))
    if any(finding.level == "error" for finding in findings):
        return int(ExitStatus.CONFIG)
    typer.echo(f"{config}: ready")
    return 0


def explain_key(
    key: Annotated[str, typer.Argument(help="A setting or section, such as learner.optim.lr.")],
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Also show the value in use there.")] = None,
) -> None:
    """What a setting means, its type, limits and default."""
    typer.echo(explain(key, loaded=load_config(config) if config else None))


def reference() -> None:
    """Print the configuration reference as Markdown."""
    typer.echo(reference_markdown())


def metrics() -> None:
    """Print the table of all metrics as Markdown."""
    typer.echo(metrics_markdown(), nl=False)
