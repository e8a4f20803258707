"""`import-verl`: verl-style settings to a configuration of ours."""

from typing import Annotated

import typer
import yaml

from deploy.verl.convert import convert, equivalent
from deploy.verl.reading import read_settings
from protocol.config.load import build_config
from protocol.errors import ExitStatus, UserError


def register(app: typer.Typer) -> None:
    """Add `import-verl`."""
    app.command("import-verl")(import_verl)


def import_verl(
    sources: Annotated[
        list[str], typer.Argument(help="YAML files, launch scripts, or key=value words, later ones win.")
    ],
) -> int:
    """Print the configuration equivalent to verl-style settings; standard error says what became of every key."""
    outcomes = convert(read_settings(sources))
    for outcome in outcomes:
        if outcome.fate != "mapped" or outcome.why:
            target = ", ".join(f"{key}={value}" for key, value in outcome.ours.items())
            line = f"{outcome.fate:9} {outcome.key}" + (f" -> {target}" if target else "")
            typer.echo(line + (f": {outcome.why}" if outcome.why else ""), err=True)
    values = equivalent(outcomes)
    typer.echo(yaml.safe_dump(values, sort_keys=False), nl=False)
    try:
        build_config({"model": {"path": "MODEL"}, "data": {"train_files": []}} | values, source="import-verl")
    except UserError as problem:
        typer.echo(f"slipstream: {problem}", err=True)
        return int(ExitStatus.CONFIG)
    refused = [outcome.key for outcome in outcomes if outcome.fate == "refused"]
    if refused:
        typer.echo(f"slipstream: {len(refused)} keys refused: remove or change {', '.join(refused)}", err=True)
    return int(ExitStatus.CONFIG if refused else ExitStatus.FINISHED)
