"""`up`, `down`, `scale`, `restart`, `logs`, `supervise`: all roles on this machine, or on a Ray cluster."""

import time
from pathlib import Path
from typing import Annotated

import typer

from deploy.commands.options import ConfigOption, Overrides, RunDirArgument, RunDirOption, load_run, refuse_running
from deploy.local import launch
from deploy.local.control import request
from deploy.local.logfiles import tail
from deploy.ray import control as on_ray
from protocol.config.load import load_config
from protocol.errors import ExitStatus, UserError


def register(app: typer.Typer) -> None:
    """Add the commands of the local supervisor."""
    app.command("up")(up)
    app.command("down")(down)
    app.command("scale")(scale)
    app.command("restart")(restart)
    app.command("logs")(logs)
    app.command("supervise", hidden=True)(supervise)


def up(
    config: ConfigOption,
    overrides: Overrides = None,
    foreground: Annotated[bool, typer.Option(help="Stay in the foreground; Ctrl-C stops everything.")] = False,
    on: Annotated[str, typer.Option(help="local, or ray: an existing Ray cluster that this machine is a node of.")] = (
        "local"
    ),
    address: Annotated[str, typer.Option(help="With --on ray: address of the cluster.")] = "auto",
) -> int:
    """Check the configuration and start all roles on this machine, or on Ray."""
    if on not in ("local", "ray"):
        raise UserError(f"--on {on}: use local or ray")
    loaded = load_config(config, overrides=overrides or [])
    run_dir = Path(loaded.config.run.dir)
    refuse_running(run_dir)
    for finding in launch.prepare_run(loaded):
        typer.echo(str(finding), err=True)
    if on == "ray":
        on_ray.start(loaded.config, address=address)
        typer.echo(f"{run_dir}: starting on Ray; see `slipstream status --run-dir {run_dir}`")
        return follow_ray(run_dir) if foreground else 0
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
    if on_ray.is_on_ray(run_dir):
        stop_ray(run_dir, wait_s=wait_s)
        return
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
    if on_ray.is_on_ray(run_dir):
        on_ray.call(run_dir, "scale", role, int(count))
    else:
        request(run_dir, {"command": "scale", "role": role, "count": int(count)})
    typer.echo(f"{run_dir}: {role} instances: {count}")


def restart(name: Annotated[str, typer.Argument(help="Role or instance name.")], run_dir: RunDirOption) -> None:
    """Stop one role, or one instance, and start it again."""
    if on_ray.is_on_ray(run_dir):
        if not on_ray.call(run_dir, "restart", name):
            raise UserError(f"no role named {name!r} runs on Ray for {run_dir}")
    else:
        request(run_dir, {"command": "restart", "name": name})
    typer.echo(f"{run_dir}: restarting {name}")


def supervise(run_dir: RunDirArgument) -> int:
    """Supervise the roles of a prepared run folder in the foreground (what `up` starts)."""
    return int(launch.supervise(run_dir, loaded=load_run(run_dir)))


def logs(
    name: Annotated[str, typer.Argument(help="Instance name, such as generator-0.")],
    run_dir: RunDirOption,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many of the last lines.")] = 50,
) -> None:
    """The last lines of a role's log, wherever it runs."""
    if on_ray.is_on_ray(run_dir):
        found = on_ray.call(run_dir, "logs", name, lines)
    else:
        found = tail(run_dir / "logs" / f"{name}.log", num_lines=lines)
    if not found:
        raise UserError(f"{run_dir} has no log of {name!r}")
    typer.echo("\n".join(found))


def follow_ray(run_dir: Path) -> int:
    """Wait until a run on Ray is over; Ctrl-C stops it."""
    try:
        while not (state := on_ray.call(run_dir, "snapshot"))["over"]:
            time.sleep(1.0)
    except KeyboardInterrupt:
        stop_ray(run_dir, wait_s=120.0)
        raise
    on_ray.forget(run_dir)
    return int(ExitStatus.FINISHED if state["finished"] else ExitStatus.STOPPED)


def stop_ray(run_dir: Path, *, wait_s: float) -> None:
    """Stop a run on Ray in order, and wait.

    Raises:
        UserError: roles are still there when the time is over.
    """
    on_ray.call(run_dir, "stop")
    deadline = time.monotonic() + wait_s
    while not on_ray.call(run_dir, "snapshot")["over"]:
        if time.monotonic() > deadline:
            raise UserError(f"{run_dir}: roles are still stopping after {wait_s:g} s")
        time.sleep(0.5)
    on_ray.forget(run_dir)
    typer.echo(f"{run_dir}: stopped")
