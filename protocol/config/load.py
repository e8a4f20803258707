"""From a YAML file and dotted overrides to a `Config`, remembering where each value came from."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from protocol.config.keys import leaf_fields, nearest_key, section_keys, section_of, unknown_keys
from protocol.config.tree import Config
from protocol.errors import UserError

EFFECTIVE_NAME = "config.yaml"
ORIGINS_NAME = "config_origins.json"
DEFAULT = "default"
COMMAND_LINE = "command line"

_FLOAT = re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?$")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without its traps: `1e-6` is a number here, and `off` is a word (only true and false are booleans)."""


_BOOL_TAG = "tag:yaml.org,2002:bool"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL_TAG]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL_TAG, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


@dataclass(frozen=True)
class Loaded:
    """A configuration and, for each dotted key that was set, where: a file name or "command line"."""

    config: Config
    origins: dict[str, str]

    def is_set(self, key: str) -> bool:
        """Whether somebody set the key (its value may still equal the default)."""
        return key in self.origins


def load_config(path: str | Path, *, overrides: Iterable[str] = ()) -> Loaded:
    """Read a YAML file and apply overrides such as `learner.optim.lr=1e-6`.

    A run's own config.yaml (written by `save_effective`) keeps the origins saved beside it.

    Raises:
        UserError: unreadable file, unknown key (with the nearest valid one), or a value out of range.
    """
    path = Path(path)
    values = _read_yaml(path)
    saved = path.with_name(ORIGINS_NAME)
    origins: dict[str, str] = {}
    if path.name == EFFECTIVE_NAME and saved.is_file():
        origins = json.loads(saved.read_text())
    else:
        _note_origins(values, origins, origin=path.name)
    return build_config(values, overrides=overrides, origins=origins, source=path.name)


def build_config(
    values: dict[str, Any],
    *,
    overrides: Iterable[str] = (),
    origins: Mapping[str, str] | None = None,
    source: str = "values",
) -> Loaded:
    """Validate nested values plus overrides (see `load_config`); `run.dir` becomes absolute."""
    known = dict(origins) if origins is not None else {}
    if origins is None:
        _note_origins(values, known, origin=source)
    merged = json.loads(json.dumps(values))
    for override in overrides:
        key, value = parse_override(override)
        _set(merged, key, value)
        known = {k: v for k, v in known.items() if not k.startswith(f"{key}.")}
        _note_origins(_nested(key, value), known, origin=COMMAND_LINE)
    unknown = unknown_keys(merged)
    if unknown:
        raise UserError("; ".join(_unknown_line(key, known, source) for key in unknown))
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise UserError("; ".join(_invalid_lines(error, known, source))) from None
    run = config.run.model_copy(update={"dir": str(Path(config.run.dir).expanduser().resolve())})
    return Loaded(config=config.model_copy(update={"run": run}), origins=known)


def parse_override(text: str) -> tuple[str, Any]:
    """Split `a.b.c=VALUE`; VALUE is read as YAML.

    Raises:
        UserError: no `=`, or not YAML.
    """
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise UserError(f"override {text!r} is not of the form key.name=value")
    try:
        return key.strip(), yaml.load(value, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"override {text!r}: the value is not YAML ({_first_line(error)})") from None


def dump_config(config: Config) -> str:
    """The whole configuration as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def save_effective(loaded: Loaded, run_dir: str | Path) -> Path:
    """Write RUN_DIR/config.yaml (every value) and RUN_DIR/config_origins.json (where each set one came from)."""
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / EFFECTIVE_NAME
    _write(folder / ORIGINS_NAME, json.dumps(loaded.origins, indent=1, sort_keys=True))
    _write(target, dump_config(loaded.config))
    return target


def origin_of(loaded: Loaded, key: str) -> str:
    """Where the value of a dotted key came from."""
    return loaded.origins.get(key, DEFAULT)


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(f"cannot read configuration {path}: {error.strerror}") from None
    try:
        values = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {_first_line(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold sections such as `model:` and `data:`, not {type(values).__name__}")
    return values


def _first_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        inner = values.get(part)
        if not isinstance(inner, dict):
            inner = values[part] = {}
        values = inner
    values[last] = value


def _note_origins(values: Mapping[str, Any], origins: dict[str, str], *, origin: str, prefix: str = "") -> None:
    sections = {key for key, _ in section_keys()}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in sections and isinstance(value, Mapping):
            _note_origins(value, origins, origin=origin, prefix=f"{key}.")
        else:
            origins[key] = origin


def _unknown_line(key: str, origins: Mapping[str, str], source: str) -> str:
    return f"unknown key {key!r} ({_origin(key, origins, source)}): did you mean {nearest_key(key)!r}?"


def _origin(key: str, origins: Mapping[str, str], source: str) -> str:
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return source


def _invalid_lines(error: ValidationError, origins: Mapping[str, str], source: str) -> list[str]:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "missing":
            lines.append(f"{key} is missing in {source}: {_describe(key)}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{key} = {item['input']!r} ({_origin(key, origins, source)}): {message}")
    return lines


def _describe(key: str) -> str:
    fields = dict(leaf_fields())
    if key in fields:
        return fields[key].description or "set it"
    section = section_of(Config.model_fields[key].annotation) if key in Config.model_fields else None
    return " ".join((section.__doc__ or "").split()) if section else "set it"
