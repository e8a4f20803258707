import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewardd.code.inside import values

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False)
)
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=6)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.sets(HASHABLE, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


def round_trip(value: Any, **decoder: Any) -> Any:
    line = values.dump_line(values.Encoder(node_classes=frozenset(decoder.get("node_classes", ()))).encode(value))
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    return values.Decoder(**decoder).decode(values.load_line(line))


def typed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return (type(value), [typed(item) for item in value])
    if isinstance(value, set | frozenset):
        return (type(value), sorted(repr(typed(item)) for item in value))
    if isinstance(value, dict):
        return (dict, [(typed(key), typed(item)) for key, item in value.items()])
    return (type(value), repr(value))


@given(VALUES)
def test_values_survive_with_their_types(value: Any) -> None:
    assert typed(round_trip(value)) == typed(value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just("r") | st.just("t"),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=12,
    )
)
def test_hostile_messages_are_a_value_error_or_a_value(message: Any) -> None:
    try:
        value = values.Decoder().decode(message)
    except ValueError:
        return
    assert typed(round_trip(value)) == typed(value)


def test_deep_and_cyclic_structures() -> None:
    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    back = round_trip(deep)
    depth = 0
    while back:
        back, depth = back[0], depth + 1
    assert depth == 50_000
    loop: list[Any] = [1]
    loop.append(loop)
    again = round_trip(loop)
    assert again[1] is again


class Sneaky(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize("value", [Sneaky(3), type("L", (list,), {})([1]), object(), len, int, math.nan.__class__])
def test_anything_but_exact_builtin_data_is_opaque(value: object) -> None:
    got = round_trip([value])[0]
    assert type(got) is values.Opaque
    assert got != value and got != 3


class Node:
    def __init__(self, label: object, next: Any = None) -> None:
        self.label, self.next = label, next


def test_instances_of_named_classes_travel_as_attributes() -> None:
    chain = None
    for label in range(30_000):
        chain = Node(label, chain)
    back = round_trip(chain, node_classes={"Node": Node})
    assert type(back) is Node and back.label == 29_999 and back.next.next.label == 29_997
    assert type(round_trip([chain])[0]) is values.Opaque


@pytest.mark.parametrize("line", [b"", b"{", b"[" * 100_000, b"\xff", b"1" * 10_000, b"nul"])
def test_lines_that_are_not_json(line: bytes) -> None:
    with pytest.raises(ValueError):
        values.load_line(line)
