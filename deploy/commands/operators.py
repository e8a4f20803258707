"""`status`, `ledger`, `keys`: looking after a run."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from deploy.commands.options import JsonOption, RunDirArgument, RunDirOption, load_run
from deploy.local.control import running_state
from deploy.ray import control as on_ray
from deploy.status.client import fetch_status
from deploy.status.render import status_view
from learner.coordinator.rows import ledger_rows
from learner.coordinator.schema import ledger_summary
from protocol.auth import generate_keys
from protocol.config import Config
from protocol.errors import ExitStatus, UserError
from protocol.messages import StatusReply


def register(app: typer.Typer) -> None:
    """Add the operators' commands."""
    app.command("status")(status)
    app.command("keys")(keys)
    app.command("ledger")(ledger)


def status(
    run_dir: RunDirOption,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> int:
    """What every role is doing, its version, the age of its last progress and what it waits for."""
    config = load_run(run_dir).config
    reply, why, supervisor = look(config, run_dir)
    if as_json:
        typer.echo(json.dumps({"coordinator": _plain(reply), "error": why or None, "supervisor": supervisor}))
    elif watch:
        with Live(status_view(reply, supervisor, why=why), refresh_per_second=4, screen=False) as live:
            while True:
                time.sleep(1.0)
                reply, why, supervisor = look(config, run_dir)
                live.update(status_view(reply, supervisor, why=why))
    else:
        Console().print(status_view(reply, supervisor, why=why))
    return 0 if reply is not None else int(ExitStatus.LOST_DEPENDENCY)


def look(config: Config, run_dir: Path) -> tuple[StatusReply | None, str, dict[str, Any] | None]:
    """(coordinator's answer, why there is none, supervisor's state) of a run."""
    supervisor = on_ray.call(run_dir, "snapshot") if on_ray.is_on_ray(run_dir) else running_state(run_dir)
    try:
        return fetch_status(config, deadline_s=3.0), "", supervisor
    except (UserError, TimeoutError) as problem:
        return None, str(problem), supervisor


def _plain(reply: StatusReply | None) -> Any:
    return None if reply is None else msgspec.to_builtins(reply)


def keys(folder: Annotated[Path, typer.Argument(help="New folder for the keys.")]) -> None:
    """Make CURVE keys for sockets beyond this machine (transport.curve_dir)."""
    for path in generate_keys(folder):
        typer.echo(str(path))


def ledger(
    run_dir: RunDirArgument,
    as_json: JsonOption = False,
    prompt: Annotated[str | None, typer.Option(help="Show the slots of this prompt id.")] = None,
    group: Annotated[int | None, typer.Option(help="Show the slots of this group.")] = None,
    slot: Annotated[int | None, typer.Option(help="With --group or --prompt: only this slot.")] = None,
) -> int:
    """The conservation equation (each slot issued is trained, filtered, retired, quarantined or in flight), or rows."""
    path = run_dir / "coordinator" / "ledger.sqlite"
    if prompt is not None or group is not None or slot is not None:
        for row in ledger_rows(path, prompt_id=prompt, group_id=group, slot=slot):
            plain = (f"{name}={value}" for name, value in row.items() if value not in (None, ""))
            typer.echo(json.dumps(row) if as_json else " ".join(plain))
        return 0
    summary = ledger_summary(path)
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        for name, count in summary.items():
            typer.echo(f"{name:>14} {count}")
    return 0 if summary["balanced"] else int(ExitStatus.FAILED)
