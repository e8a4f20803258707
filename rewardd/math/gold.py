"""Reference answers: decoding of the data set's column and a check for the data checker."""

from __future__ import annotations

import json
from typing import Any

from rewardd.math.reading import read_gold


def decode_ground_truth(value: Any) -> list[str]:
    """Reference answers (any of them counts) from a `ground_truth` column of Skywork-OR1 or a plain one.

    Accepts a string, a JSON string of a list of strings, a list, a numpy array, an Arrow list. Other JSON stays the
    text it is: `"025"` is no number and `"[0,2]"` an interval, not two references. Members that are None are dropped.

    Raises:
        ValueError: the value holds tests (code data) or nothing that is text.
    """
    for method in ("as_py", "tolist"):
        if hasattr(value, method):
            value = getattr(value, method)()
    if isinstance(value, bytes):
        value = value.decode("utf-8")
    if isinstance(value, str):
        try:
            decoded = json.loads(value)
        except ValueError:
            decoded = None
        if isinstance(decoded, dict) or is_list_of_texts(decoded):
            value = decoded
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if v is not None}
        raise ValueError(
            f"ground truth is a mapping with keys {sorted(map(str, kept))}: this is code data, not mathematics"
        )
    items = value if isinstance(value, list | tuple) else [value]
    golds = [_text(item) for item in items if item is not None]
    if not golds:
        raise ValueError("ground truth is empty: give at least one reference answer")
    return golds


def is_list_of_texts(value: Any) -> bool:
    """Whether a decoded JSON value lists references; one with numbers is itself an answer (interval, tuple)."""
    return isinstance(value, list) and all(isinstance(item, str | None) for item in value)


def _text(item: Any) -> str:
    if isinstance(item, bool) or not isinstance(item, str | int | float):
        raise ValueError(f"ground truth holds {type(item).__name__} {item!r:.80}: expected text or a number")
    return item if isinstance(item, str) else repr(item)


def check_gold(gold: str | list[str]) -> str | None:
    """Why a reference cannot be used (`empty`, `unparsed`, `too_complex`, `hedge`), or None when it can.

    An unparsed reference still matches an answer with the same spelling.
    """
    golds = [gold] if isinstance(gold, str) else gold
    if not golds:
        return "empty"
    for text in golds:
        reading = read_gold(text)
        if reading.problem == "no_answer":
            return "empty"
        if reading.problem in ("unparsed", "too_complex", "hedge"):
            return reading.problem
    return None
