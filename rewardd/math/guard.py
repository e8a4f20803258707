"""Static limits: how large the numbers of a formula could become, found without computing them."""

from __future__ import annotations

import math

from rewardd.math.errors import TooComplex
from rewardd.math.nodes import Add, BigOp, Const, Fn, Mul, Node, Num, Pow, Sym, children

MAX_MAGNITUDE = 8000.0
MAX_TERMS = 2000
MAX_NODES = 1500
_SYMBOL = 1.6


def check(node: Node) -> float:
    """Decimal digits that evaluating the formula may need; raises TooComplex above the limits.

    The bound covers numerator and denominator: `1/1999!` needs as many digits as `1999!`. Variables count as
    numbers below 40, which is what `probes` puts in.
    """
    if _count(node) > MAX_NODES:
        raise TooComplex("size")
    return _magnitude(node)


def _count(node: Node) -> int:
    total, stack = 0, [node]
    while stack and total <= MAX_NODES:
        total += 1
        stack.extend(children(stack.pop()))
    return total


def _limited(digits: float) -> float:
    if digits > MAX_MAGNITUDE:
        raise TooComplex(f"about 10^{digits:.0f}")
    return digits


def _log10(value: int) -> float:
    return value.bit_length() * 0.30103


def _magnitude(node: Node) -> float:
    if isinstance(node, Num):
        return _log10(max(abs(node.value.numerator), node.value.denominator))
    if isinstance(node, Sym):
        return _SYMBOL
    if isinstance(node, Const):
        return 0.5
    if isinstance(node, Pow):
        exponent = _bound(node.exponent)
        return _limited((_magnitude(node.base) + 0.1) * max(exponent, 1.0))
    if isinstance(node, Fn):
        return _limited(_function(node))
    if isinstance(node, BigOp):
        return _limited(_big(node))
    parts = [_magnitude(child) for child in children(node)]
    if isinstance(node, Mul | Add):
        return _limited(sum(parts))
    return max(parts, default=0.0)


def _bound(node: Node) -> float:
    """An upper bound of the absolute value, as a float."""
    if isinstance(node, Num):
        if abs(node.value) > 10**9:
            raise TooComplex("exponent")
        return abs(float(node.value))
    digits = _magnitude(node)
    if digits > 12:
        raise TooComplex("exponent")
    if isinstance(node, Mul):
        return math.prod(_bound(f) for f in node.factors)
    if isinstance(node, Add):
        return math.fsum(_bound(t) for t in node.terms)
    if isinstance(node, Pow) and isinstance(node.exponent, Num) and node.exponent.value == -1:
        return 1.0 if not isinstance(node.base, Num) or not node.base.value else abs(float(1 / node.base.value))
    return float(10**digits)


def _function(node: Fn) -> float:
    if node.name == "factorial":
        n = _bound(node.args[0])
        if n > 4000:
            raise TooComplex("factorial")
        return max(1.0, math.lgamma(n + 2) / math.log(10))
    if node.name == "binom":
        n = _bound(node.args[0])
        if n > 10**4 and not (isinstance(node.args[1], Num) and node.args[1].value <= 20):
            raise TooComplex("binomial")
        return 1.0 + min(n * 0.31, _bound(node.args[1]) * (math.log10(n + 2)))
    if node.name == "root":
        if _bound(node.args[1]) > 1000:
            raise TooComplex("root degree")
        return _magnitude(node.args[0]) + 1
    inner = max((_magnitude(arg) for arg in node.args), default=0.0)
    if node.name in ("sinh", "cosh", "tanh"):
        return _bound(node.args[0]) * 0.45 + 1
    if node.name in ("sin", "cos", "tan", "cot", "sec", "csc") and inner > 300:
        raise TooComplex("argument of a trigonometric function")
    return inner + 1


def _big(node: BigOp) -> float:
    if isinstance(node.low, Num) and isinstance(node.high, Num):
        terms = float(abs(node.high.value - node.low.value)) + 1
    else:
        terms = _bound(node.high) + _bound(node.low) + 1
    if terms > MAX_TERMS:
        raise TooComplex("number of terms")
    body = _magnitude(node.body)
    return body * terms if node.kind == "prod" else body * min(terms, 50.0) + math.log10(terms + 1)
