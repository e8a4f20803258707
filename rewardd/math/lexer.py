"""Tokens of an answer. Words become unit, noun, function or connective tokens, so the parser sees no spelling."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from rewardd.math import units
from rewardd.math.errors import TooComplex, Unparsed
from rewardd.math.vocabulary import CONNECTIVES, FILLERS, FUNCTIONS, PLAIN_COMMANDS

MAX_DIGITS = 1000

# kinds: num, sym (letter), cmd (name without backslash), op, word (text), sep (`,` `;` and or), end


class Token(NamedTuple):
    """`blank` tells whether white space stood before the token; `value` of a number is its Fraction."""

    kind: str
    text: str
    blank: bool
    value: Fraction | None = None


END = Token("end", "", False)

_TOKEN = re.compile(
    r"""(?P<blank>(?:\s|\\[,;:!>\ ]|~)+)
    |(?P<repeat>\d*\.\d*(?:\\(?:overline|bar|dot|widebar)\s*(?:\{\s*\d+\s*\}|\d)\d*(?:\\dot\s*(?:\{\s*\d\s*\}|\d))?|\(\d+\)(?!\s*[\^(/])))
    |(?P<tail>\d*\.\d+\s*(?:\.{3}|\\l?dots(?![A-Za-z])|\\cdots(?![A-Za-z])))
    |(?P<sci>(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,6}(?![A-Za-z0-9.]))
    |(?P<num>\d+\.\d+|\d+\.(?!\.)(?=\s|$|\\)|\d+|\.\d+)
    |(?P<dots>\.{3,})
    |(?P<text>\\(?:text|textbf|textit|textrm|textsf|texttt|textup|mathrm|mbox|operatorname\*?|hbox|emph|rm)\s*\{)
    |(?P<font>\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathcal|mathfrak|vec|overrightarrow|hat|tilde|mathop)(?![A-Za-z]))
    |(?P<cmd>\\[A-Za-z]+)
    |(?P<esc>\\.)
    |(?P<word>[A-Za-z]+)
    |(?P<op>[-+*/^_=<>!|(){}\[\]:%',;&?"])""",
    re.X | re.S,
)
_BEFORE_LETTER = frozenset("(=<>+-[,:")


def _number(digits: str) -> Fraction:
    if len(digits) > MAX_DIGITS:
        raise TooComplex(f"a number of {len(digits)} characters")
    return Fraction(digits)


def _repeating(text: str) -> Fraction:
    """0.1\\overline{6}, 0.\\dot{1}4\\dot{2}, 0.1(6)."""
    head, _, tail = text.partition(".")
    match = re.match(r"\d*", tail)
    assert match is not None
    fixed = match[0]
    cycle = "".join(re.findall(r"\d", tail[match.end() :]))
    if not cycle:
        raise Unparsed(text)
    return _cyclic(head, fixed, cycle)


def _cyclic(head: str, fixed: str, cycle: str) -> Fraction:
    if len(head) + len(fixed) + len(cycle) > MAX_DIGITS:
        raise TooComplex("a repeating decimal")
    scale = 10 ** len(fixed)
    return Fraction(int(head or "0") * scale + int(fixed or "0"), scale) + Fraction(
        int(cycle), scale * (10 ** len(cycle) - 1)
    )


def _continued(text: str) -> Fraction | None:
    """0.333... is one third; a tail without a period of which three (short) or two copies stand has no value."""
    match = re.match(r"(\d*)\.(\d+)", text)
    assert match is not None
    head, tail = match[1], match[2]
    for size in range(1, len(tail) // 2 + 1):
        cycle = tail[-size:]
        copies = 3 if size == 1 else 2
        if len(tail) >= copies * size and tail.endswith(cycle * copies):
            fixed = tail
            while fixed.endswith(cycle):
                fixed = fixed[:-size]
            if len(fixed) <= size:
                return _cyclic(head, fixed, cycle)
    return None


def _close(text: str, start: int) -> int:
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.S).finditer(text, start):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    raise Unparsed("unbalanced braces")


def _is_unit(word: str) -> bool:
    return (
        units.lookup(word) is not None
        or word.lower() in units.GENERIC
        or word.lower() in units.MULTIPLIERS
        or word.lower() in units.PERCENT_WORDS
        or word.lower() in ("per", "cubed", "squared")
    )


class Lexer:
    """Splits a cleaned answer into tokens; raises Unparsed or TooComplex."""

    def __init__(self, source: str) -> None:
        self.tokens: list[Token] = []
        self._scan(source, text_mode=False)

    def _scan(self, source: str, *, text_mode: bool) -> None:
        pos, blank = 0, False
        while pos < len(source):
            match = _TOKEN.match(source, pos)
            if match is None:
                raise Unparsed(f"character {source[pos]!r}")
            kind, text, pos = match.lastgroup or "", match[0], match.end()
            if kind == "blank":
                blank = True
                continue
            if kind == "text":
                end = _close(source, pos)
                self._text(source[pos:end], blank, operator="operatorname" in text)
                pos = end + 1
            elif kind == "word":
                self._word(text, blank, text_mode)
            elif kind != "font":
                self._simple(kind, text, blank)
            blank = False

    def _simple(self, kind: str, text: str, blank: bool) -> None:
        emit = self.tokens.append
        if kind == "num":
            emit(Token("num", text, blank, _number(text.removesuffix("."))))
        elif kind == "sci":
            mantissa, _, exponent = text.lower().partition("e")
            if abs(int(exponent)) > MAX_DIGITS:
                raise TooComplex(text)
            emit(Token("num", "", blank, _number(mantissa) * Fraction(10) ** int(exponent)))
        elif kind == "repeat":
            emit(Token("num", "", blank, _repeating(text)))
        elif kind == "tail":
            value = _continued(text)
            if value is None:
                raise Unparsed("a decimal with an open tail")
            emit(Token("num", "", blank, value))
        elif kind == "dots":
            emit(Token("cmd", "ldots", blank))
        elif text == "\\colon":
            emit(Token("op", ":", blank))
        elif text == "\\cr":
            emit(Token("esc", "\\", blank))
        elif kind == "cmd":
            emit(Token("cmd", text[1:], blank))
        elif kind == "esc":
            emit(Token("esc", text[1], blank))
        elif text in ",;":
            emit(Token("sep", text, blank))
        else:
            emit(Token("op", text, blank))

    def _text(self, content: str, blank: bool, *, operator: bool) -> None:
        """Words of a text command; a lone letter is a variable unless a number stands before it."""
        stripped = content.strip()
        blank = blank or content[:1].isspace()
        last, before = self.tokens[-1] if self.tokens else END, self.tokens[-2] if len(self.tokens) > 1 else END
        after_value = last.kind in ("num", "word") or last.text in ("}", ")")
        after_value = after_value or (before.kind == "word" and last.text in ("/", "cdot", "*", "per"))
        if operator and stripped in FUNCTIONS:
            self.tokens.append(Token("cmd", stripped, blank))
        elif len(stripped) == 1 and stripped.isalpha() and not (after_value and stripped not in "ei"):
            self.tokens.append(Token("sym", stripped, blank))
        else:
            if blank and content:
                content = " " + content.lstrip()
            self._scan(content, text_mode=True)

    def _word(self, word: str, blank: bool, text_mode: bool) -> None:
        emit = self.tokens.append
        previous = self.tokens[-1] if self.tokens else END
        if word in CONNECTIVES or (text_mode and word.lower() in CONNECTIVES):
            emit(Token("sep", word.lower(), blank))
        elif word in PLAIN_COMMANDS:
            emit(Token("cmd", PLAIN_COMMANDS[word], blank))
        elif word in FUNCTIONS and not (word in ("min", "deg", "arg", "dim") and previous.kind == "num"):
            emit(Token("cmd", word, blank))
        elif text_mode and not (
            len(word) == 1 and (previous.kind in ("end", "sep") or previous.text in _BEFORE_LETTER)
        ):
            emit(Token("word", word, blank))
        elif len(word) == 1:
            emit(Token("sym", word, blank))
        elif (
            word in FILLERS
            or (
                (previous.kind in ("num", "word") or previous.text in ("}", ")", "%"))
                and self._plain_unit(word, blank, previous)
            )
            or previous.text == "per"
            or (previous.text == "/" and len(self.tokens) > 1 and self.tokens[-2].kind == "word")
        ):
            emit(Token("word", word, blank))
        else:
            for letter in word:
                emit(Token("sym", letter, blank))
                blank = False

    def _plain_unit(self, word: str, blank: bool, previous: Token) -> bool:
        if _is_unit(word) and (blank or previous.kind == "num"):
            return True
        return blank and len(word) >= 3 and bool(re.search("[aeiouyAEIOUY]", word))
