"""Sets of real numbers as sorted unions of intervals: inequalities, intervals, unions, complements."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import msgspec

from rewardd.math import exact
from rewardd.math.nodes import (
    MINUS_ONE,
    Add,
    Builder,
    Const,
    Fn,
    Group,
    Listing,
    Mul,
    Named,
    NamedSet,
    Node,
    Num,
    Percent,
    Pow,
    Relation,
    SetOf,
    SetOp,
    Sym,
    mul,
    neg,
)

MAX_INTEGERS = 100
_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
Equal = Callable[[Node, Node], bool | None]


class Unclear(Exception):
    """The node is no set of real numbers with comparable end points."""


class Interval(msgspec.Struct, frozen=True):
    """`low`..`high` with approximate positions; an infinite end is open and has no node."""

    low: float
    low_node: Node | None
    low_closed: bool
    high: float
    high_node: Node | None
    high_closed: bool


RealSet = tuple[Interval, ...]
LINE = Interval(-math.inf, None, False, math.inf, None, False)


def approximate(node: Node) -> float:
    """A float near the value of a constant; raises Unclear. Used for order only, never for equality."""
    if isinstance(node, Num):
        return float(node.value) if abs(node.value) < 10**300 else math.copysign(1e300, node.value)
    if isinstance(node, Const):
        table = {"pi": math.pi, "e": math.e, "inf": math.inf}
        if node.name in table:
            return table[node.name]
    try:
        if isinstance(node, Add):
            return math.fsum(approximate(t) for t in node.terms)
        if isinstance(node, Mul):
            return math.prod(approximate(f) for f in node.factors)
        if isinstance(node, Pow):
            value = approximate(node.base) ** approximate(node.exponent)
            if isinstance(value, float):
                return value
        if isinstance(node, Percent):
            return approximate(node.arg) / 100
        if isinstance(node, Fn):
            args = [approximate(arg) for arg in node.args]
            if node.name == "root":
                return math.copysign(abs(args[0]) ** (1 / args[1]), args[0])
            if node.name in ("sqrt", "sin", "cos", "tan", "exp"):
                return float(getattr(math, node.name)(args[0]))
            if node.name == "ln" or (node.name == "log" and len(args) == 2):
                return math.log(*args)
            if node.name == "abs":
                return abs(args[0])
    except (ArithmeticError, ValueError) as error:
        raise Unclear(str(error)) from error
    raise Unclear("no constant")


def _same(left: Node | None, right: Node | None, near: float, other: float, equal: Equal) -> bool:
    """Whether two end points coincide; raises Unclear when undecided."""
    if left is None or right is None:
        return left is right and near == other
    if abs(near - other) > 1e-6 * max(1.0, abs(near), abs(other)):
        return False
    verdict = equal(left, right)
    if verdict is None:
        raise Unclear("end points")
    return verdict


def of_interval(low: Node, low_closed: bool, high: Node, high_closed: bool) -> RealSet:
    """One interval; empty when the ends cross."""
    a, b = approximate(low), approximate(high)
    if math.isnan(a) or math.isnan(b) or a > b or (a == b and not (low_closed and high_closed)):
        return ()
    low_node = None if math.isinf(a) else low
    high_node = None if math.isinf(b) else high
    return (
        Interval(a, low_node, low_closed and low_node is not None, b, high_node, high_closed and high_node is not None),
    )


def normalise(parts: RealSet, equal: Equal) -> RealSet:
    """Sorted, overlapping and touching intervals joined."""
    result: list[Interval] = []
    for part in sorted(parts, key=lambda p: (p.low, not p.low_closed)):
        if not result:
            result.append(part)
            continue
        last = result[-1]
        touching = last.high_node is not None and _same(last.high_node, part.low_node, last.high, part.low, equal)
        if (part.low < last.high and not touching) or (touching and (last.high_closed or part.low_closed)):
            longer = part if part.high > last.high or (part.high == last.high and part.high_closed) else last
            result[-1] = Interval(
                last.low, last.low_node, last.low_closed, longer.high, longer.high_node, longer.high_closed
            )
        else:
            result.append(part)
    return tuple(result)


def complement(parts: RealSet, equal: Equal) -> RealSet:
    """Everything else on the line."""
    result: list[Interval] = []
    low, low_node, low_closed = -math.inf, None, False
    for part in normalise(parts, equal):
        if part.low_node is not None:
            closed = not part.low_closed
            if low < part.low or (low_closed and closed):
                result.append(Interval(low, low_node, low_closed, part.low, part.low_node, closed))
        low, low_node, low_closed = part.high, part.high_node, not part.high_closed
        if part.high_node is None:
            return tuple(result)
    result.append(Interval(low, low_node, low_closed, math.inf, None, False))
    return tuple(result)


def intersect(left: RealSet, right: RealSet, equal: Equal) -> RealSet:
    """De Morgan on complements."""
    return complement(complement(left, equal) + complement(right, equal), equal)


def same(left: RealSet, right: RealSet, equal: Equal) -> bool:
    """Equality of two sets; raises Unclear."""
    left, right = normalise(left, equal), normalise(right, equal)
    if len(left) != len(right):
        return False
    return all(
        a.low_closed == b.low_closed
        and a.high_closed == b.high_closed
        and _same(a.low_node, b.low_node, a.low, b.low, equal)
        and _same(a.high_node, b.high_node, a.high, b.high, equal)
        for a, b in zip(left, right, strict=True)
    )


def integers(parts: RealSet, equal: Equal) -> RealSet:
    """The integers in a bounded set as single points; raises Unclear for an unbounded one."""
    result: RealSet = ()
    for part in normalise(parts, equal):
        if not (math.isfinite(part.low) and math.isfinite(part.high)) or part.high - part.low > MAX_INTEGERS:
            raise Unclear("too many integers")
        for value in range(math.floor(part.low), math.ceil(part.high) + 1):
            point = of_interval(Num(Fraction(value)), True, Num(Fraction(value)), True)
            result += intersect(point, (part,), equal)
    return result


_BRACKETS = {"(": False, "[": True, "]": False}
_CLOSERS = {")": False, "]": True, "[": False}


def of_node(node: Node, equal: Equal) -> RealSet:
    """The set a node denotes; raises Unclear for anything that is not plainly one."""
    if isinstance(node, Named):
        return of_node(node.value, equal)
    if isinstance(node, NamedSet):
        table = {"R": (LINE,), "R+": of_interval(Num(Fraction(0)), False, Const("inf"), False)}
        if node.name in table:
            return table[node.name]
    if isinstance(node, Group) and len(node.items) == 2 and node.opening in _BRACKETS and node.closing in _CLOSERS:
        return of_interval(node.items[0], _BRACKETS[node.opening], node.items[1], _CLOSERS[node.closing])
    if isinstance(node, SetOf):
        return tuple(part for item in node.items for part in of_interval(item, True, item, True))
    if isinstance(node, SetOp):
        left, right = of_node(node.left, equal), of_node(node.right, equal)
        if node.op == "union":
            return left + right
        return intersect(left, complement(right, equal) if node.op == "minus" else right, equal)
    if isinstance(node, Relation):
        return _of_relation(node, equal)
    if isinstance(node, Builder):
        element = node.element
        if isinstance(element, Relation) and element.ops == ("in",):
            domain = element.sides[1]
            if domain in (NamedSet("Z"), NamedSet("N")):
                return integers(of_node(node.condition, equal), equal)
            return intersect(of_node(domain, equal), of_node(node.condition, equal), equal)
        if isinstance(element, Sym) and not isinstance(node.condition, Named):
            return of_node(node.condition, equal)
    if isinstance(node, Listing):
        return _of_listing(node, equal)
    raise Unclear("no set")


def _of_listing(node: Listing, equal: Equal) -> RealSet:
    sets = [of_node(item, equal) for item in node.items]
    if node.joiner in ("and", ",", ";") and all(isinstance(item, Relation) for item in node.items):
        both = sets[0]
        for other in sets[1:]:
            both = intersect(both, other, equal)
        if both or node.joiner == "and":
            return both
    return tuple(part for parts in sets for part in parts)


def _of_relation(node: Relation, equal: Equal) -> RealSet:
    if node.ops == ("in",):
        return of_node(node.sides[1], equal)
    if "in" in node.ops:
        raise Unclear("a longer membership")
    result: RealSet = (LINE,)
    variable: str | None = None
    for left, op, right in zip(node.sides, node.ops, node.sides[1:], strict=False):
        name, part = _half_line(left, op, right)
        if variable not in (None, name):
            raise Unclear("two variables")
        variable = name
        result = intersect(result, part if op != "!=" else complement(part, equal), equal)
    return result


def _half_line(left: Node, op: str, right: Node) -> tuple[str, RealSet]:
    """Variable and solution set of one inequality in it (the point itself for `=` and `!=`)."""
    for name_side, bound, direction in ((left, right, op), (right, left, _FLIP[op])):
        if isinstance(name_side, Sym):
            return name_side.name, _ray(bound, direction)
    form = exact.linear(Add((left, mul(MINUS_ONE, right))))
    if form is None:
        return _absolute(left, op, right)
    name, slope, constant = form
    return name, _ray(Num(-constant / slope), op if slope > 0 else _FLIP[op])


def _absolute(left: Node, op: str, right: Node) -> tuple[str, RealSet]:
    """|x| < c and its relatives."""
    if isinstance(right, Fn):
        left, right, op = right, left, _FLIP[op]
    if not (isinstance(left, Fn) and left.name == "abs" and isinstance(left.args[0], Sym)):
        raise Unclear("an inequality that is not linear")
    name, low = left.args[0].name, neg(right)
    if op in ("<", "<="):
        return name, of_interval(low, op == "<=", right, op == "<=")
    if op in (">", ">=") and approximate(right) >= 0:
        return name, _ray(low, _FLIP[op]) + _ray(right, op)
    raise Unclear("an inequality of absolute values")


def _ray(bound: Node, op: str) -> RealSet:
    infinity = Const("inf")
    if op in ("=", "!="):
        return of_interval(bound, True, bound, True)
    if op in ("<", "<="):
        return of_interval(neg(infinity), False, bound, op == "<=")
    return of_interval(bound, op == ">=", infinity, False)
