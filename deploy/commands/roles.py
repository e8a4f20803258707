"""One role in the foreground: what the local supervisor, systemd and Ray start."""

import faulthandler
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from deploy import ranks
from deploy.commands.options import ConfigOption, Overrides
from deploy.local.specs import role_command
from protocol.config.load import load_config
from protocol.errors import ExitStatus, UserError
from protocol.logs import event, setup_logging

MAINS = {
    "coordinator": "learner.coordinator.main",
    "trainer": "learner.trainer.main",
    "rewardd": "rewardd.main",
    "generator": "generators.main",
}
log = logging.getLogger(__name__)


def register(app: typer.Typer) -> None:
    """Add one command per role."""
    for role, module in MAINS.items():
        if is_installed(module):
            command = trainer_command if role == "trainer" else _command(role)
            app.command(role, help=f"Run one {role} in the foreground.")(command)
    app.command("sft")(sft)


def is_installed(module: str) -> bool:
    """Whether a module of this project can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _command(role: str) -> Callable[..., int]:
    def command(
        config: ConfigOption,
        overrides: Overrides = None,
        name: Annotated[str, typer.Option(help="Instance name, unique in the run.")] = "",
    ) -> int:
        return run_role(role, config_path=config, name=name or default_name(role), overrides=overrides or [])

    return command


def trainer_command(
    config: ConfigOption,
    overrides: Overrides = None,
    name: Annotated[str, typer.Option(help="Instance name, unique in the run.")] = "trainer",
    node_rank: Annotated[int | None, typer.Option(help="This machine's number among trainer.num_nodes.")] = None,
) -> int:
    """This machine's trainer ranks; one rank where RANK is set (torchrun)."""
    loaded = load_config(config, overrides=overrides or [])
    if not ranks.needs_launcher(loaded.config):
        return run_role("trainer", config_path=config, name=name, overrides=overrides or [])
    setup_logging("trainer", f"{name}/launcher")
    rank = ranks.node_rank_of(loaded.config, given=node_rank)
    command = (*role_command("trainer", config_path=config, name=name), *(overrides or []))
    return int(ranks.run_ranks(loaded.config, command=command, name=name, node_rank=rank))


def sft(
    config: ConfigOption,
    overrides: Overrides = None,
    name: Annotated[str, typer.Option(help="Name in the logs.")] = "sft",
) -> int:
    """Supervised warm start on conversations (sft.files); writes RUN_DIR/sft/export, which model.path takes."""
    loaded = load_config(config, overrides=overrides or [])
    if not ranks.needs_launcher(loaded.config):
        return run_role("sft", config_path=config, name=name, overrides=overrides or [])
    setup_logging("sft", f"{name}/launcher")
    command = (*role_command("sft", config_path=config, name=name), *(overrides or []))
    return int(
        ranks.run_ranks(
            loaded.config, command=command, name=name, node_rank=ranks.node_rank_of(loaded.config, given=None)
        )
    )


def default_name(role: str) -> str:
    """Name of an instance that was given none."""
    return role if role in ("coordinator", "trainer") else f"{role}-{os.getpid()}"


def run_role(role: str, *, config_path: Path, name: str, overrides: list[str]) -> int:
    """Load the configuration, set up logging, run the role's main; returns its exit status.

    A fault of ours is logged with its traceback and ends with FAILED; a user's mistake is logged as one line.
    """
    loaded = load_config(config_path, overrides=overrides)
    setup_logging(role, name)
    faulthandler.enable()  # a watchdog's SIGABRT leaves the stack of every thread in the log
    module = importlib.import_module((MAINS | {"sft": "learner.sft.main"})[role])
    try:
        status = ExitStatus(module.run(loaded.config, name=name))
    except UserError as mistake:
        event(log, logging.CRITICAL, str(mistake), exit_status=int(mistake.status))
        return int(mistake.status)
    except Exception:
        log.critical("%s %s failed", role, name, exc_info=True)
        return int(ExitStatus.FAILED)
    event(log, logging.INFO, f"{role} ended", exit_status=int(status), meaning=status.name.lower())
    return int(status)
