"""`smoke reward|learn`: each role's hardest path alone, and what of it works."""

import typer

from deploy.commands.options import ConfigOption, Overrides
from protocol.config.load import load_config


def register(app: typer.Typer) -> None:
    """Add the `smoke` group."""
    group = typer.Typer(help="Try one role alone, in about a minute.", no_args_is_help=True)
    group.command("reward")(reward)
    group.command("learn")(learn)
    app.add_typer(group, name="smoke")


def reward(config: ConfigOption, overrides: Overrides = None) -> None:
    """Score known answers through the real workers, and code in the sandbox."""
    from deploy.smoke.reward import smoke_reward

    for line in smoke_reward(load_config(config, overrides=overrides or []).config):
        typer.echo(f"ok  {line}")


def learn(config: ConfigOption, overrides: Overrides = None) -> None:
    """One update of the longest answers on one rank, and the weights gathered."""
    from deploy.smoke.learn import smoke_learn

    for line in smoke_learn(load_config(config, overrides=overrides or []).config):
        typer.echo(f"ok  {line}")
