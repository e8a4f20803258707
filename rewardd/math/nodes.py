"""Syntax tree of an answer. Every node is immutable and hashable; equal trees are equal answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import msgspec


class Node(msgspec.Struct, frozen=True):
    """Base of all nodes."""


class Num(Node, frozen=True):
    value: Fraction


class Const(Node, frozen=True):
    """One of `pi`, `e`, `i`, `inf`."""

    name: str


class Sym(Node, frozen=True):
    """A variable with its subscript and primes, such as `x`, `a_1`, `theta`, `f'`."""

    name: str


class Add(Node, frozen=True):
    terms: tuple[Node, ...]


class Mul(Node, frozen=True):
    factors: tuple[Node, ...]


class Pow(Node, frozen=True):
    base: Node
    exponent: Node


class Fn(Node, frozen=True):
    """A named function; `log` without a base has one argument, with a base (argument, base)."""

    name: str
    args: tuple[Node, ...]


class BigOp(Node, frozen=True):
    """`sum` or `prod` of `body` for `var` = `low` .. `high`."""

    kind: str
    var: str
    low: Node
    high: Node
    body: Node


class PlusMinus(Node, frozen=True):
    """Both signs of `arg`; `sign` is 1 for plus-minus and -1 for minus-plus."""

    sign: int
    arg: Node


class Percent(Node, frozen=True):
    arg: Node


class Degree(Node, frozen=True):
    arg: Node


class Quantity(Node, frozen=True):
    """A value with a unit: `dims` are sorted (dimension, power) pairs, `factor` the size in base units."""

    value: Node
    factor: Fraction
    dims: tuple[tuple[str, int], ...]


class Group(Node, frozen=True):
    """A bracketed list: tuple, interval or vector, according to `opening` and `closing` (`(`, `[`, `<`, `]`)."""

    opening: str
    closing: str
    items: tuple[Node, ...]


class SetOf(Node, frozen=True):
    items: tuple[Node, ...]


class Builder(Node, frozen=True):
    """`{element | condition}`."""

    element: Node
    condition: Node


class Matrix(Node, frozen=True):
    rows: tuple[tuple[Node, ...], ...]


class Ellipsis(Node, frozen=True):
    pass


class Listing(Node, frozen=True):
    """Items next to each other without brackets; `joiner` is `,`, `;`, `and` or `or`."""

    items: tuple[Node, ...]
    joiner: str


class Relation(Node, frozen=True):
    """A chain `sides[0] ops[0] sides[1] ...` with ops of `= != < <= > >= in`."""

    sides: tuple[Node, ...]
    ops: tuple[str, ...]


class Named(Node, frozen=True):
    """`label = value` where the label only names the value (`x`, `f(x)`, `(x,y)`)."""

    label: Node
    value: Node


class Congruence(Node, frozen=True):
    """`left = residue (mod modulus)`; `left` is None when only the residue is written."""

    left: Node | None
    residue: Node
    modulus: Node


class SetOp(Node, frozen=True):
    """`union`, `intersection` or `minus`."""

    op: str
    left: Node
    right: Node


class NamedSet(Node, frozen=True):
    """A set letter: R, Z, N, Q, C."""

    name: str


class Ratio(Node, frozen=True):
    items: tuple[Node, ...]


class Text(Node, frozen=True):
    """Words, lower case, without articles."""

    words: str


class Choice(Node, frozen=True):
    """A lettered option with the text that follows it."""

    letter: str
    rest: Node | None


class Based(Node, frozen=True):
    """A numeral with its base as subscript."""

    value: int
    base: int


class Opaque(Node, frozen=True):
    """A formula kept as written because the grammar does not evaluate it."""

    source: str


ZERO = Num(Fraction(0))
ONE = Num(Fraction(1))
MINUS_ONE = Num(Fraction(-1))


def children(node: Node) -> Iterator[Node]:
    """Direct child nodes."""
    for name in node.__struct_fields__:
        value = getattr(node, name)
        if isinstance(value, Node):
            yield value
        elif isinstance(value, tuple):
            for item in value:
                if isinstance(item, Node):
                    yield item
                elif isinstance(item, tuple):
                    yield from (cell for cell in item if isinstance(cell, Node))


def walk(node: Node) -> Iterator[Node]:
    """The node and everything below it."""
    stack = [node]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(children(top))


def symbols(node: Node) -> set[str]:
    """Names of the free variables."""
    if isinstance(node, Sym):
        return {node.name}
    found: set[str] = set()
    for child in children(node):
        found |= symbols(child)
    if isinstance(node, BigOp):
        found.discard(node.var)
    return found


def renamed(node: Node, old: str, new: str) -> Node:
    """The tree with one variable renamed."""
    if old == new:
        return node
    if isinstance(node, Sym):
        return Sym(new) if node.name == old else node
    return rebuilt(node, lambda child: renamed(child, old, new))


def rebuilt(node: Node, change: Callable[[Node], Node]) -> Node:
    """The node with `change` applied to its direct children."""
    fields: dict[str, object] = {}
    for name in node.__struct_fields__:
        value = getattr(node, name)
        if isinstance(value, Node):
            value = change(value)
        elif isinstance(value, tuple):
            value = tuple(change(item) if isinstance(item, Node) else item for item in value)
        fields[name] = value
    return msgspec.structs.replace(node, **fields)


def neg(node: Node) -> Node:
    """The negative, folded into numbers."""
    if isinstance(node, Num):
        return Num(-node.value)
    return mul(MINUS_ONE, node)


def mul(*factors: Node) -> Node:
    """A product without nested products."""
    flat: list[Node] = []
    for factor in factors:
        flat.extend(factor.factors if isinstance(factor, Mul) else (factor,))
    return flat[0] if len(flat) == 1 else Mul(tuple(flat))


def div(left: Node, right: Node) -> Node:
    """`left / right`, folded when both are numbers."""
    if isinstance(left, Num) and isinstance(right, Num) and right.value:
        return Num(left.value / right.value)
    return mul(left, Pow(right, MINUS_ONE))
