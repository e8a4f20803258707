"""Walking the configuration tree by dotted keys."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from protocol.config.tree import Config


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section a field's type stands for, or None for a plain value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def item_section_of(annotation: Any) -> type[BaseModel] | None:
    """The section of a list field's items (`stages`), or None."""
    arguments = get_args(annotation)
    return section_of(arguments[0]) if arguments and len(arguments) == 1 else None


def leaf_fields(section: type[BaseModel] = Config, *, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All settings as (dotted key, field), in the order of the sections."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from leaf_fields(inner, prefix=f"{prefix}{name}.")
        else:
            yield prefix + name, field


def section_keys(section: type[BaseModel] = Config, *, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """All sections as (dotted key, type)."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield prefix + name, inner
            yield from section_keys(inner, prefix=f"{prefix}{name}.")


def get_value(config: BaseModel, key: str) -> Any:
    """The value at a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def nearest_key(key: str) -> str:
    """The valid key nearest to an unknown one: the same last name elsewhere first, then by spelling."""
    valid = [name for name, _ in leaf_fields()] + [name for name, _ in section_keys()]
    last = key.rsplit(".", 1)[-1]
    by_name: dict[str, list[str]] = {}
    for name in valid:
        by_name.setdefault(name.rsplit(".", 1)[-1], []).append(name)
    close = difflib.get_close_matches(last, by_name, n=1, cutoff=0.75)
    if not close:
        return difflib.get_close_matches(key, valid, n=1, cutoff=0.0)[0]
    same_name = by_name[close[0]]
    return (difflib.get_close_matches(key, same_name, n=1, cutoff=0.9) or same_name)[0]


def unknown_keys(values: Mapping[str, Any], section: type[BaseModel] = Config, *, prefix: str = "") -> list[str]:
    """Dotted keys of nested `values` that no section has."""
    unknown: list[str] = []
    for name, value in values.items():
        field = section.model_fields.get(name)
        if field is None:
            unknown += _leaves(value, f"{prefix}{name}")
            continue
        inner, item = section_of(field.annotation), item_section_of(field.annotation)
        if inner is not None and isinstance(value, Mapping):
            unknown += unknown_keys(value, inner, prefix=f"{prefix}{name}.")
        elif item is not None and isinstance(value, list):
            for index, entry in enumerate(value):
                if isinstance(entry, Mapping):
                    unknown += unknown_keys(entry, item, prefix=f"{prefix}{name}.{index}.")
    return unknown


def _leaves(value: Any, key: str) -> list[str]:
    if not isinstance(value, Mapping) or not value:
        return [key]
    return [leaf for name, inner in value.items() for leaf in _leaves(inner, f"{key}.{name}")]
