"""Whether an output or a value is the expected one. Runs in the trusted parent, on plain text and builtin types."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from typing import Any, Final

_DECIMAL: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")
_CONTEXT: Final = Context(prec=60, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
_YES_NO: Final = frozenset({"yes", "no"})
_MAX_DIGITS: Final = 20_000


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rules of equality.

    Attributes:
        tolerance: relative or absolute, for expected values written with a point or an exponent.
        yes_no_ignores_case: `yes` is `YES` where the expected token is yes or no.
    """

    tolerance: float = 1e-6
    yes_no_ignores_case: bool = False

    @classmethod
    def from_tests(cls, tests: Mapping[str, Any]) -> Comparison:
        """The rules that a test set may carry under `comparison`; raises `ValueError` for unknown ones."""
        given = tests.get("comparison") or {}
        unknown = set(given) - {"tolerance", "yes_no_ignores_case"}
        if unknown:
            raise ValueError(f"unknown comparison rule {sorted(unknown)}")
        return cls(**given)


def _lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def outputs_equal(got: str, expected: str, *, rule: Comparison) -> bool:
    """Compares line by line: stripped, blank ones at the end dropped, tokens as text or as exact decimals.

    A token that the expected output writes with a point or an exponent is met within the tolerance.
    """
    got_lines, expected_lines = _lines(got), _lines(expected)
    if len(got_lines) != len(expected_lines):
        return False
    for got_line, expected_line in zip(got_lines, expected_lines, strict=True):
        if got_line == expected_line:
            continue
        got_tokens, expected_tokens = got_line.split(), expected_line.split()
        if len(got_tokens) != len(expected_tokens):
            return False
        if not all(_tokens_equal(a, b, rule) for a, b in zip(got_tokens, expected_tokens, strict=True)):
            return False
    return True


def _tokens_equal(got: str, expected: str, rule: Comparison) -> bool:
    if got == expected:
        return True
    if rule.yes_no_ignores_case and expected.lower() in _YES_NO:
        return got.lower() == expected.lower()
    if len(got) > _MAX_DIGITS or len(expected) > _MAX_DIGITS:
        return False
    if not (_DECIMAL.fullmatch(got) and _DECIMAL.fullmatch(expected)):
        return False
    a, b = Decimal(got), Decimal(expected)
    if a == b:
        return True
    if not any(mark in expected for mark in ".eE"):
        return False
    bound = _CONTEXT.multiply(Decimal(rule.tolerance), max(Decimal(1), b.copy_abs()))
    return _CONTEXT.subtract(a, b).copy_abs() <= bound


def values_equal(got: Any, expected: Any, *, rule: Comparison) -> bool:
    """Compares a function's result, of exact builtin types, with an expected value that came from JSON.

    A tuple is a list; an integer key is its string form; a whole float is the integer of exactly that value; booleans
    are no numbers; the tolerance applies only where a float is expected.
    """
    if expected is None or isinstance(expected, bool | str):
        return type(got) is type(expected) and got == expected
    if isinstance(expected, int):
        return type(got) in (int, float) and got == expected
    if isinstance(expected, float):
        return type(got) in (int, float) and _floats_equal(got, expected, rule.tolerance)
    if isinstance(expected, list):
        return (
            type(got) in (list, tuple)
            and len(got) == len(expected)
            and all(values_equal(a, b, rule=rule) for a, b in zip(got, expected, strict=True))
        )
    if isinstance(expected, dict):
        if type(got) is not dict or len(got) != len(expected):
            return False
        if not all(type(key) in (str, int) for key in got):
            return False
        by_text = {str(key): value for key, value in got.items()}
        return by_text.keys() == expected.keys() and all(
            values_equal(by_text[key], value, rule=rule) for key, value in expected.items()
        )
    return False


def _floats_equal(got: float, expected: float, tolerance: float) -> bool:
    if got == expected or (got != got and expected != expected):
        return True
    if not math.isfinite(expected):
        return False
    try:
        return math.isfinite(got) and abs(got - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:
        return False
