"""Reading verl-style settings: YAML trees, launch scripts with `a.b.c=value` words, and such words themselves."""

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from protocol.config.load import parse_override
from protocol.errors import UserError

_WORD = re.compile(r"^(?:\+{1,2})?([A-Za-z_]\w*(?:\.\w+)+)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(\S.*)$")
_REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*)(?::-([^}]*))?\}?")


def read_settings(sources: Iterable[str]) -> dict[str, Any]:
    """Dotted key -> value of files and `key=value` words, later ones over earlier ones.

    Raises:
        UserError: a file cannot be read, or holds no settings.
    """
    settings: dict[str, Any] = {}
    for source in sources:
        word = _WORD.match(source)
        if word is not None and not Path(source).exists():
            settings[word.group(1)] = parse_override(source.lstrip("+"))[1]
            continue
        try:
            text = Path(source).read_text()
        except OSError as error:
            raise UserError(f"cannot read {source}: {error.strerror}; name a file, or key=value") from None
        found = _read_yaml(text) if source.endswith((".yaml", ".yml")) else read_script(text, os.environ)
        if not found:
            raise UserError(f"{source} holds no settings such as actor_rollout_ref.model.path=...")
        settings |= found
    return settings


def read_script(text: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings among the words of a shell script; its own variables and the environment's are filled in.

    A reference to anything else stays in the value as it is.
    """
    variables = dict(environment)
    settings: dict[str, Any] = {}
    for line in text.replace("\\\n", " ").splitlines():
        assigned = _VARIABLE.match(line.strip())
        if assigned is not None:
            variables[assigned.group(1)] = _fill(" ".join(_words(assigned.group(2))), variables)
            continue
        for word in _words(line):
            match = _WORD.match(word)
            if match is not None:
                settings[match.group(1)] = parse_override(f"{match.group(1)}={_fill(match.group(2), variables)}")[1]
    return settings


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


def _fill(text: str, variables: Mapping[str, str]) -> str:
    return _REFERENCE.sub(lambda m: variables.get(m.group(1), m.group(2) or m.group(0)), text)


def _read_yaml(text: str) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"not YAML: {' '.join(str(error).split())}") from None
    return dict(_flatten(tree, "")) if isinstance(tree, dict) else {}


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        elif name not in ("defaults", "_target_"):
            yield f"{prefix}{name}", value
