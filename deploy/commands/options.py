"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.local.control import running_state
from deploy.ray.control import is_on_ray
from protocol.config.load import EFFECTIVE_NAME, Loaded, load_config
from protocol.errors import UserError

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="YAML configuration of the run.")]
RunDirOption = Annotated[Path, typer.Option("--run-dir", "-r", help="Run folder (holds config.yaml).")]
RunDirArgument = Annotated[Path, typer.Argument(help="Run folder (holds config.yaml).")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides such as learner.optim.lr=1e-6.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def load_run(run_dir: Path) -> Loaded:
    """The configuration of an existing run folder.

    Raises:
        UserError: the folder holds no run.
    """
    path = run_dir / EFFECTIVE_NAME
    if not path.is_file():
        raise UserError(f"{run_dir} is no run folder: it holds no {EFFECTIVE_NAME}")
    return load_config(path)


def refuse_running(run_dir: Path) -> None:
    """Raise UserError when a supervisor is alive for this run folder."""
    if is_on_ray(run_dir):
        raise UserError(f"{run_dir} was last started on Ray: `slipstream down {run_dir}` first")
    state = running_state(run_dir)
    if state is not None:
        raise UserError(f"{run_dir} is in use by the supervisor with pid {state['pid']}: `slipstream down` first")
