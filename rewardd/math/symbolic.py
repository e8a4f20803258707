"""The slow stage: numeric probes, and math-verify for notation outside our own grammar.

Both are imported on first use; neither sees text that has not passed a static guard.
"""

from __future__ import annotations

import re
import threading

from rewardd.math import exact, guard
from rewardd.math.nodes import Const, Node, Opaque
from rewardd.math.vocabulary import FUNCTIONS

MAX_LENGTH = 400
MAX_DEPTH = 12
_TIMEOUT_S = 5
_FORBIDDEN = re.compile(
    r"\\(?:int|iint|oint|lim|sum|prod|det|binom|dbinom|tbinom|gcd|lcm|limsup|liminf|begin|newcommand|def|input|text"
    r"|operatorname|circ|l?dots|cdots|%)(?![A-Za-z])|!|\^\s*\{?[^{}\^]*\^|\d{16,}|[\"'`@#;~]|__|\\\\"
)
_EXPONENT = re.compile(r"\^\s*(?:\{([^{}]*)\}|(\S))")
_DEGREE = re.compile(r"\\sqrt\s*\[([^\]]*)\]")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_BIG = re.compile(r"\d{4,}")


def leaf(left: Node, right: Node) -> bool | None:
    """Equality of two scalar formulas: exactly, else by probes. Raises TooComplex, Undefined."""
    verdict = exact_leaf(left, right)
    if verdict is None:
        from rewardd.math import probes

        verdict = probes.equal(left, right)
    return verdict


def exact_leaf(left: Node, right: Node) -> bool | None:
    """Equality of two scalar formulas as far as exact arithmetic decides it. Raises TooComplex, Undefined."""
    if left == right:
        return True
    guard.check(left)
    guard.check(right)
    infinite = [isinstance(side, Const) and side.name == "inf" for side in (left, right)]
    if any(infinite):
        try:
            exact.normal_form(right if infinite[0] else left)
        except exact.TooLong:
            return False
        return False
    if isinstance(left, Opaque) or isinstance(right, Opaque):
        return None
    return exact.equal(left, right)


def admissible(text: str) -> bool:
    """Whether math-verify may see a text: short, shallow, small powers, no words, no big operators."""
    if len(text) > MAX_LENGTH or _FORBIDDEN.search(text):
        return False
    depth = deepest = 0
    for char in text:
        depth += (char in "({[") - (char in ")}]")
        deepest = max(deepest, depth)
    if depth or deepest > MAX_DEPTH:
        return False
    powers = [match[1] or match[2] or "" for match in _EXPONENT.finditer(text)]
    powers += [match[1] for match in _DEGREE.finditer(text)]
    if any(_BIG.search(power) or re.search(r"\d{3,}", power) for power in powers):
        return False
    return all(word in FUNCTIONS for word in _WORD.findall(text))


def compare_texts(gold: str, answer: str) -> bool | None:
    """math-verify's verdict on two formulas outside our grammar; None when it may not see one or cannot read it."""
    if not (admissible(gold) and admissible(answer)):
        return None
    from math_verify import LatexExtractionConfig, parse, verify

    timeout = _TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    sides = []
    for text in (gold, answer):
        config = [LatexExtractionConfig(boxed_match_priority=0)]
        parsed = parse(f"\\boxed{{{text}}}", config, fallback_mode="no_fallback", parsing_timeout=timeout)  # type: ignore[arg-type]
        if not parsed:
            return None
        sides.append(parsed)
    return bool(verify(sides[0], sides[1], float_rounding=15, timeout_seconds=timeout))


def warm_up() -> None:
    """Imports the slow libraries and runs each once, so that the first answer of a worker is not the slow one."""
    from rewardd.math import probes
    from rewardd.math.nodes import Fn, Num

    del probes
    two = Num(exact.Fraction(2))
    leaf(Fn("ln", (two,)), Fn("sin", (two,)))
    compare_texts("\\overline{z}+1", "1+\\overline{z}")
