"""`units`: systemd units of a run, rendered from its configuration."""

import getpass
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from deploy.commands.options import ConfigOption, Overrides
from deploy.local.specs import ROLES, num_gpus
from deploy.systemd.binding import consumers, cpu_shares, cpus_near_gpus, own_cpus
from deploy.systemd.render import FIRST_WITH_RESTART_STEPS, UnitSettings, render_units
from protocol.config import Config
from protocol.config.checks import check_config, raise_on_errors
from protocol.config.load import load_config, save_effective
from protocol.errors import UserError


def register(app: typer.Typer) -> None:
    """Add `units`."""
    app.command("units")(units)


def units(
    config: ConfigOption,
    out: Annotated[Path, typer.Option(help="Folder for the units, such as /etc/systemd/system.")],
    overrides: Overrides = None,
    user: Annotated[str, typer.Option(help="Whom the roles run as; default: you.")] = "",
    roles: Annotated[str, typer.Option(help="Roles of this machine.")] = ",".join(ROLES),
    node_rank: Annotated[int, typer.Option(help="This machine's number among trainer.num_nodes.")] = 0,
    environment: Annotated[list[str] | None, typer.Option("--env", help="More variables, KEY=VALUE.")] = None,
    private_tmp: Annotated[bool, typer.Option(help="Give every role a /tmp of its own.")] = True,
    bind_cpus: Annotated[bool, typer.Option(help="Give trainer and generators CPUs of their own.")] = True,
) -> None:
    """Render systemd units: coordinator, trainer, rewardd@, generator@ and a target that holds them."""
    loaded = load_config(config, overrides=overrides or [])
    raise_on_errors(check_config(loaded))
    chosen = [role.strip() for role in roles.split(",")]
    unknown = [role for role in chosen if role not in ROLES]
    if unknown:
        raise UserError(f"--roles: no role named {unknown[0]!r}; there are {', '.join(ROLES)}")
    if private_tmp:
        refuse_hidden(loaded.config)
    devices = num_gpus()
    bound = consumers(loaded.config, num_devices=devices)
    shares = cpu_shares(loaded.config, cpus=own_cpus(), num_devices=devices, near=cpus_near_gpus()) if bind_cpus else {}
    rendered = render_units(
        loaded.config,
        UnitSettings(
            config_path=save_effective(loaded, loaded.config.run.dir),
            user=user or getpass.getuser(),
            roles=chosen,
            node_rank=node_rank,
            systemd_version=installed_systemd(),
            environment=_variables(environment or []),
            cpu_shares=shares,
            gpus=bound if devices else {},
            has_gpu=devices > 0,
            private_tmp=private_tmp,
        ),
    )
    for name, text in rendered.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        typer.echo(str(path))
    target = f"slipstream-{loaded.config.run.name}.target"
    typer.echo(f"start with: systemctl daemon-reload && systemctl start {target}", err=True)


def refuse_hidden(config: Config) -> None:
    """Raise UserError for a path that a private /tmp hides from the roles."""
    paths = {
        "run.dir": [config.run.dir],
        "model.path": [config.model.path],
        "data.train_files": config.data.train_files,
    }
    paths |= {"data.eval_files": config.data.eval_files, "the interpreter": [sys.executable]}
    paths |= {"model.tokenizer_path": [config.model.tokenizer_path] if config.model.tokenizer_path else []}
    for what, names in paths.items():
        for name in names:
            absolute = str(Path(name).absolute())
            if absolute.startswith(("/tmp/", "/var/tmp/")):
                raise UserError(
                    f"{what} {absolute} would be hidden from the roles, each of which has a /tmp of its own: "
                    "use another folder, or --no-private-tmp"
                )


def installed_systemd() -> int:
    """Version of this machine's systemd; the first with every key used here when there is none."""
    if shutil.which("systemctl") is None:
        return FIRST_WITH_RESTART_STEPS
    words = subprocess.run(["systemctl", "--version"], capture_output=True, text=True).stdout.split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else FIRST_WITH_RESTART_STEPS


def _variables(given: list[str]) -> dict[str, str]:
    broken = [item for item in given if not item.partition("=")[1] or not item.partition("=")[0]]
    if broken:
        raise UserError(f"--env {broken[0]!r} is not of the form KEY=VALUE")
    return {key: value for key, _, value in (item.partition("=") for item in given)}
