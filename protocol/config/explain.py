"""`slipstream config explain KEY` and the configuration reference: what a setting means, its type and default."""

import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from protocol.config.keys import get_value, item_section_of, leaf_fields, nearest_key, section_keys
from protocol.config.load import Loaded, origin_of
from protocol.config.tree import Config
from protocol.errors import UserError


def explain(key: str, *, loaded: Loaded | None = None) -> str:
    """Lines about one setting or all settings of a section; with `loaded`, also the values in use and their origin.

    Raises:
        UserError: no such key.
    """
    fields = dict(leaf_fields())
    sections = dict(section_keys())
    if key in fields:
        return _setting(key, fields[key], loaded)
    if key in sections:
        inside = [_setting(name, field, loaded) for name, field in fields.items() if name.startswith(f"{key}.")]
        return "\n\n".join([" ".join((sections[key].__doc__ or "").split()), *inside])
    raise UserError(f"no setting named {key!r}: did you mean {nearest_key(key)!r}?")


def reference_markdown() -> str:
    """The configuration reference of docs/, one table per section."""
    fields = dict(leaf_fields())
    out = [
        "# Configuration reference",
        "",
        "Made by `slipstream config reference`; the source is `protocol/config/`.",
        "",
    ]
    for section, kind in [*section_keys(), ("", Config)]:
        rows = [(n, f) for n, f in fields.items() if n.rpartition(".")[0] == section]
        out += [f"## {section or 'top level'}", "", " ".join((kind.__doc__ or "").split()), ""]
        if rows:
            out += ["| key | type | default | meaning |", "|---|---|---|---|"]
            out += [_row(name, field) for name, field in rows]
            out.append("")
    return "\n".join(out)


def _row(name: str, field: FieldInfo) -> str:
    cells = (
        f"`{name}`",
        type_name(field.annotation) + limits(field),
        f"`{default_of(field)}`",
        field.description or "",
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _setting(key: str, field: FieldInfo, loaded: Loaded | None) -> str:
    lines = [key, f"  {field.description}"]
    lines.append(f"  type: {type_name(field.annotation)}{limits(field)}")
    item = item_section_of(field.annotation)
    if item is not None:
        lines += [f"    {name}: {inner.description}" for name, inner in item.model_fields.items()]
    lines.append(f"  default: {default_of(field)}")
    if loaded is not None:
        lines.append(f"  in use: {get_value(loaded.config, key)!r} (from {origin_of(loaded, key)})")
    return "\n".join(lines)


def default_of(field: FieldInfo) -> str:
    """The default as text; "required" when there is none."""
    return "required" if field.is_required() else repr(field.get_default(call_default_factory=True))


def limits(field: FieldInfo) -> str:
    """Bounds of a number as text, such as ", >= 1"."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [f"{sign} {getattr(m, name)}" for m in field.metadata for name, sign in signs.items() if hasattr(m, name)]
    return "".join(f", {bound}" for bound in found)


def type_name(annotation: Any) -> str:
    """A type as a user reads it: choices spelled out, `None` as "none"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(str(a) for a in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(a) for a in arguments)
    if origin is list:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return f"map of {type_name(arguments[0])} to {type_name(arguments[1])}"
    if annotation is type(None):
        return "none"
    return getattr(annotation, "__name__", str(annotation))
