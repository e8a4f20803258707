"""Shapes of answers: what a node can be read as (list, interval, vector, ratio, quantity) and its elements."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

from rewardd.math import exact
from rewardd.math.nodes import (
    MINUS_ONE,
    Add,
    Builder,
    Const,
    Degree,
    Ellipsis,
    Group,
    Listing,
    Matrix,
    Mul,
    Named,
    NamedSet,
    Node,
    Num,
    PlusMinus,
    Quantity,
    Ratio,
    Relation,
    SetOf,
    SetOp,
    Sym,
    Text,
    children,
    mul,
    neg,
    rebuilt,
    symbols,
    walk,
)

MAX_ITEMS = 1000
ANGLE = (("angle", 1),)


COLLECTIONS = (Group, SetOf, Listing, Matrix, Ratio)


def both(verdicts: object) -> bool | None:
    """Three-valued `and` over an iterable."""
    seen = list(verdicts)  # type: ignore[call-overload]
    if any(v is False for v in seen):
        return False
    return None if any(v is None for v in seen) else True


def either(verdicts: object) -> bool | None:
    """Three-valued `or` over an iterable."""
    seen = list(verdicts)  # type: ignore[call-overload]
    if any(v is True for v in seen):
        return True
    return None if any(v is None for v in seen) else False


def unwrap(node: Node) -> Node:
    """Membership of a variable is its set; a set of one element is the element; a numeric chain stays."""
    while True:
        if isinstance(node, Relation) and node.ops == ("in",) and isinstance(node.sides[0], Sym | Group):
            node = node.sides[1]
        elif isinstance(node, SetOf | Listing) and len(node.items) == 1 and not isinstance(node.items[0], Relation):
            node = node.items[0]
        elif isinstance(node, Named) and isinstance(node.value, SetOf | SetOp | NamedSet | Builder):
            node = node.value
        elif isinstance(node, Mul) and sum(isinstance(factor, Matrix) for factor in node.factors) == 1:
            node = scaled(node)
        else:
            return node


def scaled(node: Mul) -> Matrix:
    """A matrix times scalars, the scalars multiplied into the cells."""
    (matrix,) = (factor for factor in node.factors if isinstance(factor, Matrix))
    scalars = [factor for factor in node.factors if factor is not matrix]
    return Matrix(tuple(tuple(mul(*scalars, cell) for cell in row) for row in matrix.rows))


def is_continuum(node: Node) -> bool:
    """Whether a node can only be read as a set of reals (an interval, an inequality, a union)."""
    if isinstance(node, SetOp | NamedSet | Builder):
        return True
    if isinstance(node, Group):
        mixed = (node.opening, node.closing) in (("(", "]"), ("[", ")"), ("]", "["), ("]", "]"), ("[", "["))
        infinite = any(isinstance(n, Const) and n.name == "inf" for item in node.items for n in walk(item))
        return len(node.items) == 2 and (mixed or infinite)
    if isinstance(node, Relation):
        return any(op in ("<", "<=", ">", ">=", "!=") for op in node.ops)
    if isinstance(node, Listing):
        return any(is_continuum(item) for item in node.items)
    return False


def as_interval(node: Node) -> Node:
    """A chain `a < x <= b` as the interval (a, b]."""
    if isinstance(node, Relation) and len(node.ops) == 2 and isinstance(node.sides[1], Sym):
        low, _, high = node.sides
        ops = node.ops
        if all(op in (">", ">=") for op in ops):
            low, high, ops = high, low, (ops[1].replace(">", "<"), ops[0].replace(">", "<"))
        if all(op in ("<", "<=") for op in ops):
            return Group("(" if ops[0] == "<" else "[", ")" if ops[1] == "<" else "]", (low, high))
    return node


def as_collection(node: Node) -> Node:
    """Formulas with plus-minus as the list of their values."""
    signs = [n for n in walk(node) if isinstance(n, PlusMinus)]
    if not signs or len(signs) > 4:
        return node
    if isinstance(node, Listing | SetOf):
        items = [as_collection(item) for item in node.items]
        flat = [part for item in items for part in (item.items if isinstance(item, Listing) else (item,))]
        return Listing(tuple(flat), "or")
    if isinstance(node, Group | Matrix | Ratio | Relation):
        return node
    return Listing((signed(node, 1), signed(node, -1)), "or")


def signed(node: Node, sign: int) -> Node:
    """The formula with every plus-minus replaced by one sign (the opposite for minus-plus)."""
    if isinstance(node, PlusMinus):
        inner = signed(node.arg, sign)
        return inner if node.sign * sign > 0 else neg(inner)
    if not any(isinstance(n, PlusMinus) for n in walk(node)):
        return node
    return rebuilt(node, lambda child: signed(child, sign))


def members(node: Node) -> tuple[Node, ...]:
    """Elements of a collection, shared labels removed (`x = 3 or x = -3`, `k = 3, 5, 7`); a scalar is one element."""
    if not isinstance(node, Group | SetOf | Listing):
        return (node,)
    items = node.items
    labels = {root_name(item.label) for item in items if isinstance(item, Named)}
    if isinstance(node, Listing | SetOf) and len(labels) == 1:
        items = tuple(item.value if isinstance(item, Named) else item for item in items)
    flat: list[Node] = []
    for item in items:
        expanded = as_collection(item)
        flat.extend(expanded.items if isinstance(expanded, Listing) else (expanded,))
    return tuple(flat)


def named_items(node: Node) -> dict[Node, Node] | None:
    """`x = 1, y = 2` as a mapping; None unless every item is named and the labels differ."""
    if isinstance(node, Named) and isinstance(node.label, Group) and isinstance(node.value, Group):
        return dict(zip(node.label.items, node.value.items, strict=False))
    if not isinstance(node, Listing | Group | SetOf) or not all(isinstance(item, Named) for item in node.items):
        return None
    found = {item.label: item.value for item in node.items if isinstance(item, Named)}
    return found if len(found) == len(node.items) > 1 else None


def root_name(label: Node) -> Node:
    """`x_1` as `x`: numbered solutions of one unknown."""
    return Sym(label.name.split("_")[0]) if isinstance(label, Sym) else label


def in_name_order(node: Node, items: dict[Node, Node]) -> Node:
    """Named values as a tuple in the order of their names."""
    names = sorted(items, key=lambda label: label.name if isinstance(label, Sym) else "")
    return Group("(", ")", tuple(items[name] for name in names))


def column(node: Node) -> Node:
    """A matrix of one column or row as a vector."""
    if isinstance(node, Matrix):
        if len(node.rows[0]) == 1:
            return Group("<", ">", tuple(row[0] for row in node.rows))
        if len(node.rows) == 1:
            return Group("<", ">", node.rows[0])
    return node


def has_dots(items: tuple[Node, ...]) -> bool:
    return any(isinstance(item, Ellipsis) for item in items)


def expand(items: tuple[Node, ...]) -> tuple[Node, ...]:
    """`1, 3, ..., 19` written out; an endless or irregular list stays as it is."""
    places = [i for i, item in enumerate(items) if isinstance(item, Ellipsis)]
    if len(places) != 1 or not 0 < places[0] < len(items) - 1:
        return items
    before, after = items[: places[0]], items[places[0] + 1 :]
    values = [exact.rational(item) for item in before + after]
    if any(v is None for v in values):
        return items
    numbers = [v for v in values if v is not None]
    head, tail = numbers[: len(before)], numbers[len(before) :]
    step = head[1] - head[0] if len(head) > 1 else Fraction(1)
    regular = all(b - a == step for part in (head, tail) for a, b in itertools.pairwise(part))
    if not step or not regular:
        return items
    count = (tail[-1] - head[0]) / step
    if count.denominator != 1 or not 0 < count <= MAX_ITEMS:
        return items
    return tuple(Num(head[0] + step * k) for k in range(int(count) + 1))


def ratio_items(node: Node) -> tuple[Node, ...] | None:
    """Terms of a ratio; a single value v is v : 1."""
    if isinstance(node, Ratio):
        return node.items
    if isinstance(node, (COLLECTIONS, Text | Relation)):
        return None
    return (node, Num(Fraction(1)))


def quantity(node: Node) -> Node:
    """Degrees as a quantity of angle; the unit of a negative or scaled quantity stays outermost."""
    if isinstance(node, Degree):
        return Quantity(node.arg, Fraction(1), ANGLE)
    inner = list(children(node))
    if type(node).__name__ == "Mul" and isinstance(inner[-1], Quantity | Degree):
        last = quantity(inner[-1])
        assert isinstance(last, Quantity)
        return Quantity(mul(*inner[:-1], last.value), last.factor, last.dims)
    if isinstance(node, Quantity) and isinstance(node.value, Quantity | Degree):
        return quantity(node.value)
    return node


def has_pi(node: Node) -> bool:
    return any(isinstance(n, Const) and n.name == "pi" for n in walk(node))


def is_implicit(gold: Named, answer: Named) -> bool:
    """Whether each label occurs in the other's formula (`y = 2x` and `x = y/2` are one line)."""
    return gold.label in set(walk(answer.value)) and answer.label in set(walk(gold.value))


def equation(node: Node) -> Node:
    return Relation((node.label, node.value), ("=",)) if isinstance(node, Named) else node


def difference(relation: Relation) -> Node:
    return Add((relation.sides[0], mul(MINUS_ONE, relation.sides[1])))


def chain_value(node: Node, leaf: Callable[[Node, Node], bool | None]) -> Node:
    """`2 + 3 = 5` is the value 5 and `x = 2 + 3 = 5` is x = 5, when the sides agree; other relations stay."""
    if not isinstance(node, Relation) or set(node.ops) != {"="}:
        return node
    sides = node.sides
    if isinstance(sides[0], Sym) and len(sides) > 2:
        sides = sides[1:]
    if len(sides) > 1 and any(symbols(side) for side in sides) and len(node.sides) == 2:
        return node
    if len(sides) > 1 and all(leaf(sides[-1], side) for side in sides[:-1]):
        return sides[-1]
    return node
