"""`demo` and `plot`."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.commands.options import Overrides, RunDirArgument


def register(app: typer.Typer) -> None:
    """Add the demo and the report."""
    app.command("demo")(demo)
    app.command("plot")(plot)


def demo(
    overrides: Overrides = None,
    short: Annotated[bool, typer.Option("--short", help="3 updates only; the same report.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of data, order and sampling.")] = 0,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", "-r", help="Run folder; default: a new one.")] = None,
) -> int:
    """The main job end to end on this machine: a small model learns arithmetic, with a report at the end."""
    from deploy.demo.recipe import DemoOptions
    from deploy.demo.run import run_demo

    folder = run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    options = DemoOptions(run_dir=folder.resolve(), short=short, seed=seed, overrides=tuple(overrides or ()))
    return int(run_demo(options, console=Console()))


def plot(run_dir: RunDirArgument) -> None:
    """Write the report of a run: curves, tables, TensorBoard events, trajectories."""
    from deploy.report.build import build_report

    report = build_report(run_dir)
    for line in [*report.table_lines(), *report.advice_lines()]:
        typer.echo(line)
    typer.echo(str(report.path))
