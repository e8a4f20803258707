"""The part of pytest's interface that test files of code data sets use, without its start-up cost."""

from __future__ import annotations

import itertools
import math
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, Self

PARAMETERS = "__parameters__"


class Raises:
    """`with raises(ValueError, match="...") as info:`; like pytest's, it fails when nothing is raised."""

    def __init__(
        self, expected: type[BaseException] | tuple[type[BaseException], ...], *, match: str | None = None
    ) -> None:
        self._expected = expected
        self._match = match
        self.value: BaseException | None = None
        self.type: type[BaseException] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, _: Any) -> bool:
        assert kind is not None, f"{self._expected} was not raised"
        if not issubclass(kind, self._expected):
            return False
        self.type, self.value = kind, fault
        assert self._match is None or re.search(self._match, str(fault)), f"message does not match {self._match!r}"
        return True


class Approx:
    """Equal to numbers, and to lists, tuples and mappings of numbers, within the tolerances."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self._expected = expected
        self._relative = 1e-6 if rel is None and abs is None else rel or 0.0
        self._absolute = 1e-12 if abs is None else abs
        self._nan_ok = nan_ok

    def __repr__(self) -> str:
        return f"approx({self._expected!r})"

    def _near(self, got: Any, expected: Any) -> bool:
        if type(expected) in (list, tuple):
            return (
                type(got) in (list, tuple)
                and len(got) == len(expected)
                and all(self._near(a, b) for a, b in zip(got, expected, strict=True))
            )
        if type(expected) is dict:
            return (
                type(got) is dict
                and got.keys() == expected.keys()
                and all(self._near(got[key], value) for key, value in expected.items())
            )
        if type(got) not in (int, float, complex, bool) or type(expected) not in (int, float, complex, bool):
            return type(got) is type(expected) and bool(got == expected)
        if got == expected:
            return True
        if isinstance(got, complex) or isinstance(expected, complex):
            return bool(abs(got - expected) <= max(self._relative * abs(expected), self._absolute))
        if math.isnan(got) or math.isnan(expected):
            return self._nan_ok and math.isnan(got) and math.isnan(expected)
        return math.isclose(got, expected, rel_tol=0.0, abs_tol=max(self._relative * abs(expected), self._absolute))

    def __eq__(self, other: object) -> bool:
        return self._near(other, self._expected)

    __hash__ = None  # type: ignore[assignment]


def raises(expected: Any, *arguments: Any, match: str | None = None, **named: Any) -> Any:
    if not arguments:
        return Raises(expected, match=match)
    with Raises(expected) as info:
        arguments[0](*arguments[1:], **named)
    return info


def fail(reason: str = "", pytrace: bool = True) -> None:
    raise AssertionError(reason)


class _Mark:
    """`parametrize` multiplies the calls of a test; every other mark changes nothing."""

    def parametrize(self, names: Any, sets: Any, **_: Any) -> Callable[[Any], Any]:
        listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

        def mark(function: Any) -> Any:
            rows = []
            for row in sets:
                cells = row.values if isinstance(row, _Param) else row
                rows.append(
                    dict(zip(listed, cells if len(listed) > 1 or isinstance(row, _Param) else (cells,), strict=True))
                )
            setattr(function, PARAMETERS, [*getattr(function, PARAMETERS, []), rows])
            return function

        return mark

    def __getattr__(self, _: str) -> Any:
        def mark(*arguments: Any, **named: Any) -> Any:
            bare = len(arguments) == 1 and not named and isinstance(arguments[0], types.FunctionType)
            return arguments[0] if bare else lambda function: function

        return mark


class _Param:
    def __init__(self, *cells: Any, **_: Any) -> None:
        self.values = cells


def calls(function: Any) -> Iterator[dict[str, Any]]:
    """The keyword arguments of each call that the marks of a test function ask for."""
    for rows in itertools.product(*getattr(function, PARAMETERS, [])):
        yield {name: cell for row in rows for name, cell in row.items()}


def module() -> types.ModuleType:
    shim = types.ModuleType("pytest")
    shim.__dict__.update(raises=raises, approx=Approx, fail=fail, mark=_Mark(), param=_Param)
    return shim
