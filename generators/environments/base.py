"""The interface between the generator service and an environment, and how one is found.

The policy samples a turn until a stop token or stop string. The environment then sees the episode so far and either
ends it (None) or says something, whose tokens follow in the same answer with loss mask 0, and the policy goes on.
An answer that is interrupted goes on at another generator, so an environment keeps nothing between turns that it
could not compute again from the episode.
"""

import importlib
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal, Protocol

from protocol.errors import UserError

GROUP = "slipstream.environments"
"""Entry point group of environments that are named without a module."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One part of an answer, special tokens left out of its text."""

    by: Literal["policy", "environment"]
    text: str


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What an environment sees. The ground truth is not part of it: only reward daemons know it.

    Attributes:
        prompt: text of the prompt as the policy saw it, special tokens included.
        turns: oldest first; the last one is the policy's turn that just ended.
        stop_reason: the stop token's id or the stop string that ended it.
    """

    prompt_id: str
    prompt: str
    turns: tuple[Turn, ...]
    stop_reason: str


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the environment says.

    Attributes:
        text: the content of a message, or text to append as it is.
        role: the chat role to say it in, through the model's chat template, which also opens the policy's next turn;
            None appends `text` alone, for turns that end in a stop string within one message.
    """

    text: str
    role: str | None = "user"


class Environment(Protocol):
    """Called from the generator's asyncio loop: whatever blocks belongs into a thread or process."""

    async def respond(self, episode: Episode) -> Observation | None:
        """What to say after the policy's turn; None ends the answer.

        An exception, or no answer within `generators.environment.deadline_s`, hands the answer back to be tried again;
        it never becomes a reward.
        """

    async def close(self) -> None:
        """Ends what the environment started."""


def load_environment(name: str, options: dict[str, Any]) -> Environment:
    """The environment called `package.module:Class`, or by its entry point in `slipstream.environments`.

    Raises:
        UserError: there is none of that name, or it does not take these options.
    """
    setting = f"generators.environment.name = {name!r}"
    try:
        if ":" in name:
            module, _, attribute = name.partition(":")
            factory = getattr(importlib.import_module(module), attribute)
        else:
            found = list(entry_points(group=GROUP, name=name))
            if not found:
                known = ", ".join(sorted({point.name for point in entry_points(group=GROUP)}))
                raise UserError(
                    f"{setting} is unknown; use package.module:Class or one of: {known or 'none installed'}"
                )
            factory = found[0].load()
    except (ImportError, AttributeError) as error:
        raise UserError(f"{setting} cannot be loaded: {error}") from error
    try:
        environment: Environment = factory(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"{setting} does not start with generators.environment.options: {error}") from error
    return environment
