"""The verdicts of the Skywork-OR1 grader (math-verify on the whole text), for reproducing its numbers.

`parse(text)`; fewer than two results is wrong; the matched string in the references is right; else any
`verify(parse("\\\\boxed{gold}"), parsed)`. The text is the piece after the first `</think>`, or all of it. Unlike the
original, a text whose evaluation could run without end is refused first.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

from rewardd.math import guard
from rewardd.math.errors import TooComplex
from rewardd.math.extract import extract
from rewardd.math.nodes import Opaque
from rewardd.math.reading import read

if TYPE_CHECKING:
    from rewardd.math.verdict import MathResult

MAX_TEXT = 64 * 1024
_TIMEOUT_S = 5
_EXPLOSIVE = re.compile(
    r"\^\s*\{?\s*\d+\s*(?:\^|!)|\d{5,}\s*!|!\s*\)?\s*!|\d{400,}|(?:\\\[){200}|(?:[({]\s*){100}|(?:\\frac\{1\}\{1\+){60}"
)


def _refused(text: str) -> bool:
    """Whether math-verify could hang on the answer it would pick from a text."""
    found = extract(text)
    if not found.parts or "box" not in text:
        return bool(_EXPLOSIVE.search(text))
    for part in found.parts:
        reading = read(part)
        if reading.problem == "too_complex":
            return True
        try:
            for node in reading.nodes:
                guard.check(node)
        except TooComplex:
            return True
        unread = not reading.nodes or any(isinstance(node, Opaque) for node in reading.nodes)
        if unread and _EXPLOSIVE.search(part):
            return True
    return False


def verify(response: str, golds: list[str]) -> MathResult:
    """One verdict of the original grader."""
    from math_verify import parse
    from math_verify import verify as equal

    from rewardd.math.verdict import MathResult

    pieces = response.split("</think>")
    text = (pieces[1] if len(pieces) > 1 else response)[-MAX_TEXT:]
    if _refused(text):
        return MathResult(False, "too_complex", None, "none")
    timeout = _TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    parsed = parse(text, parsing_timeout=timeout)  # type: ignore[arg-type]
    if len(parsed) < 2:
        return MathResult(False, "no_answer", None, "none")
    shown = str(parsed[1])[:512]
    if parsed[1] in golds:
        return MathResult(True, "equal_string", shown, "exact")
    for gold in golds:
        reference = parse(f"\\boxed{{{gold}}}", parsing_timeout=timeout)  # type: ignore[arg-type]
        if equal(reference, parsed, timeout_seconds=timeout):
            return MathResult(True, "symbolic", shown, "symbolic")
    return MathResult(False, "different", shown, "symbolic")
