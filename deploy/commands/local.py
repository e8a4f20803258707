"""`up`, `down`, `scale`, `restart`, `supervise`: all roles on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.commands.options import ConfigOption, Overrides, RunDirArgument, RunDirOption, load_run, refuse_running
from deploy.local import launch
from deploy.local.control import request
from protocol.config.load import load_config
from protocol.errors import UserError


def register(app: typer.Typer) -> None:
    """Add the commands of the local supervisor."""
    app.command("up")(up)
    app.command("down")(down)
    app.command("scale")(scale)
    app.command("restart")(restart)
    app.command("supervise", hidden=True)(supervise)


def up(
    config: ConfigOption,
    overrides: Overrides = None,
    foreground: Annotated[bool, typer.Option(help="Stay in the foreground; Ctrl-C stops everything.")] = False,
) -> int:
    """Check the configuration and start all roles on this machine."""
    loaded = load_config(config, overrides=overrides or [])
    run_dir = Path(loaded.config.run.dir)
    refuse_running(run_dir)
    for finding in launch.prepare_run(loaded):
        typer.echo(str(finding), err=True)
    if foreground:
        return supervise(run_dir)
    process = launch.start_supervisor(run_dir, detach=True)
    typer.echo(f"{run_dir}: supervisor started (pid {process.pid}); see `slipstream status --run-dir {run_dir}`")
    return 0


def down(
    run_dir: RunDirArgument,
    wait_s: Annotated[float, typer.Option(help="Longest wait for everything to be gone.")] = 120.0,
) -> None:
    """Stop all roles in order and wait until they are gone."""
    request(run_dir, {"command": "stop"})
    if not launch.wait_until_gone(run_dir, deadline_s=wait_s):
        raise UserError(f"{run_dir}: roles are still stopping after {wait_s:g} s")
    typer.echo(f"{run_dir}: stopped")


def scale(target: Annotated[str, typer.Argument(help="generators=K or rewardd=K.")], run_dir: RunDirOption) -> None:
    """Change the number of generators or reward daemons of a running run."""
    role, _, count = target.partition("=")
    if not count.isdigit():
        raise UserError(f"{target!r} is not of the form generators=K")
    role = {"generators": "generator"}.get(role, role)
    request(run_dir, {"command": "scale", "role": role, "count": int(count)})
    typer.echo(f"{run_dir}: {role} instances: {count}")


def restart(name: Annotated[str, typer.Argument(help="Role or instance name.")], run_dir: RunDirOption) -> None:
    """Stop one role, or one instance, and start it again."""
    request(run_dir, {"command": "restart", "name": name})
    typer.echo(f"{run_dir}: restarting {name}")


def supervise(run_dir: RunDirArgument) -> int:
    """Supervise the roles of a prepared run folder in the foreground (what `up` starts)."""
    return int(launch.supervise(run_dir, loaded=load_run(run_dir)))
