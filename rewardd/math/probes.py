"""Equality of formulas by high-precision evaluation, at random points when there are variables.

A constant is evaluated once with as many digits as `guard.check` says its numbers need plus 60; two constants are
equal when they agree in all but 20 of these. With variables, eight points are compared (polynomial identity testing);
variables named like indices take integers. Negative points count only where both formulas are real without a complex
step in between, so that `2 ln x` equals `ln x^2` while `|x|` differs from `x`.
"""

from __future__ import annotations

import math
import random
from typing import Any

import mpmath

from rewardd.math import guard
from rewardd.math.errors import TooComplex, Undefined
from rewardd.math.nodes import Add, BigOp, Const, Degree, Fn, Mul, Node, Num, Percent, Pow, Quantity, Sym, symbols, walk

_INDICES = frozenset(["n", "m", "k", "j", "l", "N", "M", "K"])
_LOCAL = frozenset(["floor", "ceil", "max", "min", "abs", "binom", "factorial"])
_FAR = (40, 40, 1000, 1000, 100_000, 100_000)
_MAX_POINTS = 24
_WANTED = 8
_GUARD_DIGITS = 20
_BUDGET = 15_000.0
_MAX_INTEGER = 10_000
_MAX_GAMMA_DIGITS = 250


class Unsupported(Exception):
    """A sub-formula that cannot be evaluated."""


class _Domain(Exception):
    """A real evaluation left the real numbers."""


class Budget:
    """Bounds the work of one comparison in units of an elementary function at 60 digits (about 30 microseconds)."""

    def __init__(self) -> None:
        self.left = _BUDGET

    def spend(self, functions: float) -> None:
        """Pays for one node and so many elementary functions at the current precision.

        Raises TooComplex when the budget is used up.
        """
        size = mpmath.mp.dps / 60
        self.left -= 0.1 * size + functions * size**1.5
        if self.left < 0:
            raise TooComplex("evaluation")


class Evaluator:
    """Values of trees at one point. In real mode a complex step raises; `unit` scales `log` without a base."""

    def __init__(self, env: dict[str, Any], *, real: bool, log_unit: Any, budget: Budget) -> None:
        self.env = env
        self.real = real
        self.log_unit = log_unit
        self.budget = budget

    def value(self, node: Node) -> Any:
        """The value as mpmath number; raises Unsupported, Undefined, TooComplex."""
        self.budget.spend(0)
        if isinstance(node, Num):
            return mpmath.mpf(node.value.numerator) / node.value.denominator
        if isinstance(node, Sym):
            return self.env[node.name]
        if isinstance(node, Const):
            if node.name == "i":
                return mpmath.mpc(0, 1)
            if node.name == "inf":
                raise Unsupported("infinity")
            return +getattr(mpmath, node.name)
        if isinstance(node, Add):
            return mpmath.fsum(self.value(term) for term in node.terms)
        if isinstance(node, Mul):
            return mpmath.fprod(self.value(factor) for factor in node.factors)
        if isinstance(node, Pow):
            return self.power(node)
        if isinstance(node, Percent):
            return self.value(node.arg) / 100
        if isinstance(node, Degree):
            return self.value(node.arg) * mpmath.pi / 180
        if isinstance(node, Quantity):
            return self.value(node.value)
        if isinstance(node, BigOp):
            return self.big(node)
        if isinstance(node, Fn):
            return self.checked(self.function(node.name, [self.value(arg) for arg in node.args]))
        raise Unsupported(type(node).__name__)

    def checked(self, value: Any) -> Any:
        if self.real and isinstance(value, mpmath.mpc) and value.imag:
            raise _Domain
        return value

    def power(self, node: Pow) -> Any:
        base, exponent = self.value(node.base), self.value(node.exponent)
        if not base:
            if not exponent or mpmath.re(exponent) < 0:
                raise Undefined("a power of zero")
            return base
        if mpmath.isint(exponent) and abs(exponent) < 10**6:
            return base ** int(mpmath.re(exponent))
        self.budget.spend(2)
        return self.checked(mpmath.power(base, exponent))

    def big(self, node: BigOp) -> Any:
        low, high = self.value(node.low), self.value(node.high)
        if not (mpmath.isint(low) and mpmath.isint(high)) or high - low > guard.MAX_TERMS:
            raise Unsupported("bounds")
        saved = self.env
        terms = []
        for k in range(int(low), int(high) + 1):
            self.env = {**saved, node.var: mpmath.mpf(k)}
            terms.append(self.value(node.body))
        self.env = saved
        return mpmath.fsum(terms) if node.kind == "sum" else mpmath.fprod(terms)

    def function(self, name: str, args: list[Any]) -> Any:
        self.budget.spend(1)
        first = args[0]
        if name in ("factorial", "binom"):
            return self.combinatorial(name, args)
        if name == "sqrt":
            return mpmath.sqrt(first)
        if name == "root":
            degree = args[1]
            if mpmath.isint(degree) and int(degree) % 2 and not isinstance(first, mpmath.mpc) and first < 0:
                return -mpmath.root(-first, int(degree))
            return mpmath.power(first, 1 / degree)
        if name in ("ln", "log"):
            if not first:
                raise Undefined("logarithm of zero")
            if len(args) == 2:
                return mpmath.log(first) / mpmath.log(args[1])
            return mpmath.log(first) * (self.log_unit if name == "log" else 1)
        if name == "abs":
            return abs(first)
        if name in _DIRECT:
            return getattr(mpmath, _DIRECT[name])(*args)
        if name in ("max", "min"):
            if any(isinstance(a, mpmath.mpc) for a in args):
                raise Unsupported(name)
            return max(args) if name == "max" else min(args)
        raise Unsupported(name)

    def combinatorial(self, name: str, args: list[Any]) -> Any:
        """Exact for integers; through the gamma function (slow, so for few digits only) elsewhere."""
        if all(mpmath.isint(arg) and 0 <= mpmath.re(arg) < _MAX_INTEGER for arg in args):
            integers = [int(mpmath.re(arg)) for arg in args]
            return mpmath.mpf(math.factorial(*integers) if name == "factorial" else math.comb(*integers))
        if mpmath.mp.dps > _MAX_GAMMA_DIGITS:
            raise TooComplex(f"{name} of a non-integer")
        self.budget.spend(30)
        return mpmath.factorial(*args) if name == "factorial" else mpmath.binomial(*args)


_DIRECT = {
    "sin": "sin",
    "cos": "cos",
    "tan": "tan",
    "cot": "cot",
    "sec": "sec",
    "csc": "csc",
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
    "arccot": "acot",
    "sinh": "sinh",
    "cosh": "cosh",
    "tanh": "tanh",
    "arcsinh": "asinh",
    "arccosh": "acosh",
    "floor": "floor",
    "ceil": "ceil",
    "Re": "re",
    "Im": "im",
    "arg": "arg",
}


def equal(left: Node, right: Node) -> bool | None:
    """Whether two formulas agree; None when they cannot be evaluated. Raises TooComplex, Undefined."""
    digits = max(guard.check(left), guard.check(right))
    units = [mpmath.mpf(1)]
    used = {n.name for side in (left, right) for n in walk(side) if isinstance(n, Fn) and len(n.args) == 1}
    budget = Budget()
    with mpmath.workdps(int(digits) + 60):
        if "log" in used:
            units.append(1 / mpmath.log(10))
        verdicts = [_equal(left, right, unit, budget) for unit in units]
    return True if True in verdicts else None if None in verdicts else False


def _equal(left: Node, right: Node, log_unit: Any, budget: Budget) -> bool | None:
    names = sorted(symbols(left) | symbols(right))
    imaginary = any(isinstance(n, Const) and n.name == "i" for side in (left, right) for n in walk(side))
    if not names:
        try:
            evaluator = Evaluator({}, real=False, log_unit=log_unit, budget=budget)
            return _close(evaluator.value(left), evaluator.value(right))
        except (ZeroDivisionError, ValueError) as error:
            raise Undefined(str(error)) from error
        except (Unsupported, KeyError, NotImplementedError, OverflowError):
            return None
    rng = random.Random(repr(names))
    agreed = 0
    far = _FAR if any(_is_local(node) for side in (left, right) for node in walk(side)) else ()
    scales = [*far, *[1] * _MAX_POINTS]
    far_budget = Budget()
    for attempt, scale in enumerate(scales, start=-len(far)):
        positive = attempt % 2 == 0 if scale > 1 else attempt < _MAX_POINTS // 2
        env = {name: _point(rng, name, positive, scale=scale) for name in names}
        spent = far_budget if scale > 1 else budget
        evaluator = Evaluator(env, real=not imaginary, log_unit=log_unit, budget=spent)
        try:
            same = _close(evaluator.value(left), evaluator.value(right))
        except (Undefined, _Domain, ZeroDivisionError, ValueError):
            continue
        except (Unsupported, KeyError, NotImplementedError, OverflowError):
            if scale > 1:
                continue
            return None
        except TooComplex:
            if scale > 1:
                continue
            raise
        if not same:
            return False
        agreed += scale == 1
        if agreed >= _WANTED and not positive:
            break
    if agreed >= 3:
        return True
    return None


def _is_local(node: Node) -> bool:
    """Whether formulas with this node can agree at small numbers and differ at larger ones."""
    return isinstance(node, BigOp) or (isinstance(node, Fn) and node.name in _LOCAL and bool(symbols(node)))


def _point(rng: random.Random, name: str, positive: bool, *, scale: int = 1) -> Any:
    """A number below 3, or of the order of `scale`; for an index an integer below 40, small ones more often."""
    if name in _INDICES:
        small = rng.randrange(1, 13) if rng.random() < 0.6 else rng.randrange(13, 40)
        return mpmath.mpf(small if scale == 1 else rng.randrange(scale, 2 * scale))
    value = mpmath.mpf(rng.randrange(10**9, 3 * 10**10)) / 10**10 * scale
    return value if positive or rng.random() < (0.3 if scale == 1 else 0.0) else -value


def _close(left: Any, right: Any) -> bool:
    """Agreement in all but the guard digits; both below the precision count as zero."""
    scale = max(abs(left), abs(right))
    tolerance = mpmath.mpf(10) ** (_GUARD_DIGITS - mpmath.mp.dps)
    return bool(scale <= tolerance or abs(left - right) <= tolerance * scale)
