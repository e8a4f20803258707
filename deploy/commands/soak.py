"""`soak`: chaos for N minutes against all roles, with scripted generators."""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from deploy.commands.options import JsonOption
from protocol.errors import ExitStatus, UserError


def register(app: typer.Typer) -> None:
    """Add `soak`."""
    app.command("soak")(soak)


def soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long faults go on.")] = 60.0,
    as_json: JsonOption = False,
    seed: Annotated[int, typer.Option(help="Seed of the faults.")] = 0,
    every: Annotated[float, typer.Option(min=0.1, help="Mean seconds between two faults.")] = 3.0,
    rate: Annotated[float, typer.Option(min=1.0, help="Tokens per second of each scripted request.")] = 100.0,
    folder: Annotated[Path | None, typer.Option(help="New folder for run and logs; default: a temporary one.")] = None,
) -> int:
    """Kill, freeze, cut off and restart all roles at random; then count what was lost, doubled or waited for.

    Exit status 0 only when nothing was. Needs no GPU and no model: generators are scripted, a stand-in trains.
    """
    if folder is not None:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty: name a new folder for the soak")
        folder.mkdir(parents=True, exist_ok=True)
        return _soak(folder, minutes=minutes, as_json=as_json, seed=seed, every=every, rate=rate)
    with tempfile.TemporaryDirectory(prefix="slipstream-soak-") as name:
        return _soak(Path(name), minutes=minutes, as_json=as_json, seed=seed, every=every, rate=rate)


def _soak(folder: Path, *, minutes: float, as_json: bool, seed: int, every: float, rate: float) -> int:
    from deploy.soak.driver import Soak

    experiment = Soak(
        folder,
        seed=seed,
        mean_pause_s=every,
        rate=rate,
        on_progress=lambda line: typer.echo(line, err=True),
    )
    report = experiment.run(60.0 * minutes)
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    else:
        for line in report.lines():
            typer.echo(line)
    return int(ExitStatus.FINISHED if report.ok else ExitStatus.FAILED)
