"""Exact values without floats: rational functions over Q of variables, pi, e, i and square roots.

A formula becomes numerator / denominator, two polynomials whose generators are the variables, `pi`, `e`, `i`, square
roots of primes, and any other sub-formula as an unexplained generator. Reduced by i^2 = -1 and sqrt(p)^2 = p, the
products of distinct square roots of primes are linearly independent over Q(i), and pi is transcendental, so a
difference that reduces to zero is zero and one that does not is a difference, as long as no unexplained generator
takes part.
"""

from __future__ import annotations

import math
from fractions import Fraction

from rewardd.math.errors import TooComplex, Undefined
from rewardd.math.nodes import Add, Const, Degree, Fn, Mul, Node, Num, Percent, Pow, Quantity, Sym

Generator = tuple[str, object]
Monomial = tuple[tuple[Generator, int], ...]
Poly = dict[Monomial, Fraction]
Quotient = tuple[Poly, Poly]

MAX_TERMS = 250
MAX_POWER = 24
MAX_BITS = 20_000
_ONE: Poly = {(): Fraction(1)}
_SMALL_PRIMES = [p for p in range(2, 1000) if all(p % q for q in range(2, math.isqrt(p) + 1))]


class TooLong(Exception):
    """The normal form has too many terms; the difference stays undecided."""


def _key(item: tuple[Generator, int]) -> str:
    return repr(item[0])


def _times(left: Monomial, right: Monomial) -> tuple[Monomial, int]:
    """The product of two monomials and the rational factor its reduction leaves."""
    powers = dict(left)
    factor = 1
    for generator, power in right:
        total = powers.get(generator, 0) + power
        kind, value = generator
        if kind == "i" and total >= 2:
            factor *= -1 if (total // 2) % 2 else 1
            total %= 2
        elif kind == "root" and total >= 2:
            assert isinstance(value, int)
            factor *= value ** (total // 2)
            total %= 2
        powers[generator] = total
    return tuple(sorted(((g, p) for g, p in powers.items() if p), key=_key)), factor


def multiply(left: Poly, right: Poly) -> Poly:
    """The reduced product; raises TooLong."""
    if len(left) * len(right) > MAX_TERMS * 40:
        raise TooLong
    result: Poly = {}
    for m1, c1 in left.items():
        for m2, c2 in right.items():
            monomial, factor = _times(m1, m2) if m1 and m2 else (m1 or m2, 1)
            total = result.get(monomial, Fraction(0)) + c1 * c2 * factor
            if total:
                result[monomial] = total
            else:
                result.pop(monomial, None)
    if len(result) > MAX_TERMS:
        raise TooLong
    return result


def add(left: Poly, right: Poly, scale: int = 1) -> Poly:
    """`left + scale * right`."""
    result = dict(left)
    for monomial, coefficient in right.items():
        total = result.get(monomial, Fraction(0)) + scale * coefficient
        if total:
            result[monomial] = total
        else:
            result.pop(monomial, None)
    return result


def rational(node: Node) -> Fraction | None:
    """The value of a formula that is plainly a rational number, else None."""
    if isinstance(node, Num):
        return node.value
    if isinstance(node, Sym | Const):
        return None
    try:
        top, bottom = normal_form(node)
    except TooLong:
        return None
    if all(not m for m in top) and all(not m for m in bottom):
        return top.get((), Fraction(0)) / bottom[()]
    return None


def normal_form(node: Node) -> Quotient:
    """Numerator and denominator; raises TooLong, TooComplex, Undefined. `guard.check` comes first."""
    if isinstance(node, Num):
        return ({(): node.value} if node.value else {}), _ONE
    if isinstance(node, Sym):
        return {((("sym", node.name), 1),): Fraction(1)}, _ONE
    if isinstance(node, Const) and node.name != "inf":
        return {(((node.name, 0), 1),): Fraction(1)}, _ONE
    if isinstance(node, Add):
        total: Quotient = ({}, _ONE)
        for term in node.terms:
            top, bottom = normal_form(term)
            if bottom == total[1]:
                total = (add(total[0], top), bottom)
            else:
                total = (add(multiply(total[0], bottom), multiply(top, total[1])), multiply(total[1], bottom))
        return total
    if isinstance(node, Mul):
        result: Quotient = (_ONE, _ONE)
        for factor in node.factors:
            top, bottom = normal_form(factor)
            result = (multiply(result[0], top), multiply(result[1], bottom))
        return result
    if isinstance(node, Pow):
        return _power(node)
    if isinstance(node, Percent):
        top, bottom = normal_form(node.arg)
        return multiply(top, {(): Fraction(1, 100)}), bottom
    if isinstance(node, Degree):
        top, bottom = normal_form(node.arg)
        return multiply(top, {((("pi", 0), 1),): Fraction(1, 180)}), bottom
    if isinstance(node, Quantity):
        return normal_form(node.value)
    if isinstance(node, Fn):
        return _function(node)
    return _unexplained(node)


def _unexplained(node: Node) -> Quotient:
    return {((("formula", node), 1),): Fraction(1)}, _ONE


def _constant(value: Fraction) -> Quotient:
    return ({(): value} if value else {}), _ONE


def _power(node: Pow) -> Quotient:
    exponent = rational(node.exponent)
    if exponent is None:
        return _unexplained(node)
    top, bottom = normal_form(node.base)
    if not bottom:
        raise Undefined("division by zero")
    if exponent.denominator != 1:
        value = _value((top, bottom))
        if value is not None and value >= 0 and exponent.denominator <= 64:
            found = _root(value, exponent.denominator)
            if found is not None:
                return _raise(found, int(exponent.numerator))
        return _unexplained(node)
    return _raise((top, bottom), int(exponent))


def _raise(base: Quotient, power: int) -> Quotient:
    top, bottom = base
    if power < 0:
        if not top:
            raise Undefined("division by zero")
        top, bottom, power = bottom, top, -power
    value = _value((top, bottom))
    if value is not None:
        if max(value.numerator.bit_length(), value.denominator.bit_length()) * power > MAX_BITS and abs(value) != 1:
            raise TooComplex("power")
        if value in (0, 1, -1):
            return _constant(value ** (power % 2 or 2) if power else Fraction(1))
        return _constant(value**power)
    if len(top) == len(bottom) == 1 and power <= MAX_BITS // 64:
        return _monomial_power(top, power), _monomial_power(bottom, power)
    if power > MAX_POWER:
        raise TooLong
    result: Quotient = (_ONE, _ONE)
    for _ in range(power):
        result = (multiply(result[0], top), multiply(result[1], bottom))
    return result


def _monomial_power(poly: Poly, power: int) -> Poly:
    result, square = _ONE, poly
    while power:
        if power & 1:
            result = multiply(result, square)
        power >>= 1
        if power:
            square = multiply(square, square)
    return result


def _value(form: Quotient) -> Fraction | None:
    top, bottom = form
    if len(bottom) == 1 and () in bottom and (not top or (len(top) == 1 and () in top)):
        return top.get((), Fraction(0)) / bottom[()]
    return None


def integer_root(value: int, degree: int) -> int | None:
    """The exact integer root of a non-negative integer, or None."""
    if value < 2:
        return value
    if degree == 2:
        root = math.isqrt(value)
        return root if root * root == value else None
    low, high = 1, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if middle**degree <= value:
            low = middle
        else:
            high = middle - 1
    return low if low**degree == value else None


def _root(value: Fraction, degree: int) -> Quotient | None:
    """The real root of a non-negative rational as a rational or a product of square roots; None for other roots."""
    top, bottom = integer_root(value.numerator, degree), integer_root(value.denominator, degree)
    if top is not None and bottom is not None:
        return _constant(Fraction(top, bottom))
    if degree % 2 == 0 and degree > 2:
        half = _half(value, degree // 2)
        return _root(half, 2) if half is not None else None
    if degree != 2:
        return None
    radicand = value.numerator * value.denominator
    outside, generators = 1, []
    for prime in _SMALL_PRIMES:
        if prime * prime > radicand:
            break
        power = 0
        while radicand % prime == 0:
            radicand //= prime
            power += 1
        outside *= prime ** (power // 2)
        if power % 2:
            generators.append(((("root", prime)), 1))
    rest = math.isqrt(radicand)
    if rest * rest == radicand:
        outside *= rest
    elif radicand < 1_000_000:
        generators.append((("root", radicand), 1))
    elif radicand > 1:
        return None
    monomial = tuple(sorted(generators, key=_key))
    return {monomial: Fraction(outside, value.denominator)}, _ONE


def _half(value: Fraction, degree: int) -> Fraction | None:
    top, bottom = integer_root(value.numerator, degree), integer_root(value.denominator, degree)
    return Fraction(top, bottom) if top is not None and bottom is not None else None


def _function(node: Fn) -> Quotient:
    values = [rational(arg) for arg in node.args]
    first = values[0] if values else None
    name = node.name
    if name == "binom" and values[1] is not None and values[1].denominator == 1 and 0 <= values[1] <= 12:
        return _binomial(node.args[0], int(values[1]))
    if first is None or any(v is None for v in values):
        return _unexplained(node)
    numbers = [v for v in values if v is not None]
    found: Quotient | None = None
    if name == "sqrt":
        found = _root(abs(first), 2)
        if found is not None and first < 0:
            found = (multiply(found[0], {((("i", 0), 1),): Fraction(1)}), found[1])
    elif name == "root" and numbers[1].denominator == 1 and 1 <= numbers[1] <= 1000:
        degree = int(numbers[1])
        if first >= 0 or degree % 2:
            found = _root(abs(first), degree)
            if found is not None and first < 0:
                found = (multiply(found[0], {(): Fraction(-1)}), found[1])
    elif name == "abs":
        found = _constant(abs(first))
    elif name in ("max", "min"):
        found = _constant(max(numbers) if name == "max" else min(numbers))
    elif name in ("floor", "ceil"):
        found = _constant(Fraction(math.floor(first) if name == "floor" else math.ceil(first)))
    elif all(v.denominator == 1 for v in numbers):
        found = _integer_function(name, [int(v) for v in numbers])
    return found if found is not None else _unexplained(node)


def _integer_function(name: str, args: list[int]) -> Quotient | None:
    if name == "factorial" and args[0] >= 0:
        return _constant(Fraction(math.factorial(args[0])))
    if name == "binom" and args[0] >= 0:
        return _constant(Fraction(math.comb(args[0], args[1]) if args[1] >= 0 else 0))
    if name == "gcd":
        return _constant(Fraction(math.gcd(*args)))
    if name == "lcm":
        return _constant(Fraction(math.lcm(*args)))
    if name == "log" and len(args) == 2 and args[0] > 0 and args[1] > 1:
        power, value = 0, 1
        while value < args[0]:
            value *= args[1]
            power += 1
        return _constant(Fraction(power)) if value == args[0] else None
    if name in ("ln", "log") and args == [1]:
        return _constant(Fraction(0))
    if name in ("sin", "tan") and args == [0]:
        return _constant(Fraction(0))
    if name == "cos" and args == [0]:
        return _constant(Fraction(1))
    return None


def _binomial(top: Node, k: int) -> Quotient:
    """binom(x, k) as the polynomial x (x-1) ... (x-k+1) / k!."""
    base = normal_form(top)
    result: Quotient = (_ONE, _ONE)
    for j in range(k):
        factor = add(base[0], multiply(base[1], {(): Fraction(j)}) if j else {}, -1)
        result = (multiply(result[0], factor), multiply(result[1], base[1]))
    return multiply(result[0], {(): Fraction(1, math.factorial(k))}), result[1]


def decided(poly: Poly) -> bool:
    """Whether a non-zero reduced polynomial is surely a non-zero function of its variables."""
    kinds = {generator[0] for monomial in poly for generator, _ in monomial}
    return "formula" not in kinds and not {"pi", "e"} <= kinds


def equal(left: Node, right: Node) -> bool | None:
    """Whether two formulas have the same value; None when undecided. Raises Undefined, TooComplex."""
    try:
        (t1, b1), (t2, b2) = normal_form(left), normal_form(right)
        if not b1 or not b2:
            raise Undefined("division by zero")
        difference = add(t1, t2, -1) if b1 == b2 else add(multiply(t1, b2), multiply(t2, b1), -1)
    except TooLong:
        return None
    if not difference:
        return True
    return False if decided(difference) and decided(b1) and decided(b2) else None


def _split(poly: Poly) -> dict[Monomial, Poly]:
    """Coefficients (polynomials in the constants) by monomial in the variables."""
    parts: dict[Monomial, Poly] = {}
    for monomial, coefficient in poly.items():
        variables = tuple(item for item in monomial if item[0][0] in ("sym", "formula"))
        constants = tuple(item for item in monomial if item[0][0] not in ("sym", "formula"))
        parts.setdefault(variables, {})[constants] = coefficient
    return parts


def proportional(left: Node, right: Node) -> Fraction | bool | None:
    """Whether `left = 0` and `right = 0` are one equation: the numerators differ by a constant factor.

    Returns the factor left / right when it is rational, True for another constant, False when there is none, None
    when undecided.
    """
    try:
        t1, t2 = normal_form(left)[0], normal_form(right)[0]
        s1, s2 = _split(t1), _split(t2)
        sure = decided(t1) and decided(t2)
        shared = next((m for m in s1 if m in s2), None)
        if shared is None or s1.keys() != s2.keys():
            return False if sure else None
        c1, c2 = s1[shared], s2[shared]
        if add(multiply(t1, c2), multiply(t2, c1), -1):
            return False if sure else None
    except TooLong:
        return None
    if set(c1) == set(c2) == {()}:
        return c1[()] / c2[()]
    return True


def linear(node: Node) -> tuple[str, Fraction, Fraction] | None:
    """(variable, slope, constant) of a formula slope * x + constant with rational coefficients, else None."""
    try:
        top, bottom = normal_form(node)
    except TooLong:
        return None
    scale = _value((bottom, _ONE))
    names = {m[0][0][1] for m in top if m}
    if scale is None or len(names) != 1 or any(m and (len(m) > 1 or m[0][1] != 1 or m[0][0][0] != "sym") for m in top):
        return None
    slope = next(c for m, c in top.items() if m)
    return str(names.pop()), slope / scale, top.get((), Fraction(0)) / scale
