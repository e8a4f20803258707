"""Answers in words: names, yes/no, lettered options, "no solution", "all real numbers"."""

from __future__ import annotations

import re
from fractions import Fraction

from rewardd.math.nodes import Choice, Const, Listing, NamedSet, Node, Num, SetOf, Sym, Text
from rewardd.math.vocabulary import FUNCTIONS, NUMBER_WORDS, SYMBOL_WORDS

_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|up)?|mathrm|mathbf|mathsf|mbox|operatorname|boldsymbol|emph|bf|rm)\s*\{([^{}]*)\}"
)
_BLANKS = re.compile(r"(?:\s|\\[ ,;:!]|~)+")
_CHOICE = re.compile(
    r"\(([A-J])\)\s*[.:]?(?:\s+(.*))?|([A-J])\s*[.:)](?:\s+(.*))?|(?i:option|choice)\s*\(?([A-J])\)?[.:]?\s*(.*)", re.S
)
_LOWER_CHOICE = re.compile(r"\(([a-e])\)")
_WORDS = re.compile(r"[^\W\d_][^\d_\\{}()\[\]+*/^=<>|$%&#@;\"]*", re.S)
_ARTICLE = re.compile(r"\b(?:the|an|a)\b", re.I)
_SPLIT = re.compile(r"\s*,\s*(?:and|or)\s+|\s+(?:and|or)\s+|\s*,\s*")
_OR = re.compile(r"\bor\b")
_NO_SOLUTION = re.compile(
    r"(?:there (?:is|are) )?no (?:real |such |integer |positive |valid )*(?:solutions?|roots?|values?)(?: exists?)?"
    r"|empty set"
)
_ALL_REALS = re.compile(
    r"(?:x (?:is|can be) )?(?:all|any|every) (?:the )?reals?(?: numbers?| values?)?(?: x)?"
    r"|(?:the )?(?:set of )?real numbers|all real values of x"
)
_SYNONYMS = {"dne": "does not exist", "doesn't exist": "does not exist", "infinitely many solutions": "infinitely many"}


def plain(source: str) -> str:
    """The text without text commands."""
    if "\\" not in source:
        return source
    return _BLANKS.sub(" ", _WRAPPER.sub(r"\1", _WRAPPER.sub(r"\1", source))).strip()


def read_choice(source: str) -> tuple[str, str] | None:
    """Letter and following text of a lettered option, e.g. `(B) 12`; None for anything else."""
    text = plain(source)
    match = _CHOICE.fullmatch(text)
    if match is None:
        lower = _LOWER_CHOICE.fullmatch(text)
        return (lower[1].upper(), "") if lower else None
    letter = match[1] or match[3] or match[5]
    rest = match[2] or match[4] or match[6] or ""
    if re.match(r"(?:and|or|,)\b", rest):
        return None
    return letter, rest.strip()


def read_words(source: str) -> Node | None:
    """The node of an answer that consists of words alone; None when it should be read as mathematics."""
    text = plain(source)
    if not _WORDS.fullmatch(text) or len(text) > 400:
        return None
    wrapped = "\\text" in source or "\\mathrm" in source or "\\mbox" in source
    if (not wrapped and "\\" in source) or len(text) == 1:
        return None
    letters = re.findall(r"[^\W\d_]+", text)
    if len(letters) == 1 and not wrapped and not _is_word(letters[0]):
        return None
    if len(letters) > 1 and all(len(word) == 1 or word in ("and", "or") for word in letters) and not wrapped:
        return None
    parts = [part for part in _SPLIT.split(text) if part.strip()]
    if len(parts) > 1 and not _NO_SOLUTION.fullmatch(text.lower()):
        joiner = "or" if _OR.search(text) else ","
        return Listing(tuple(_one(part) for part in parts), joiner)
    return _one(text)


def _is_word(word: str) -> bool:
    if word in FUNCTIONS or word in SYMBOL_WORDS:
        return False
    lower = word.lower()
    return (
        len(word) >= 4
        or (len(word) == 3 and word.isupper())
        or lower in ("yes", "no", "dne", "one", "two", "six", "ten")
    )


def _one(text: str) -> Node:
    bare = text.strip(" .,:!?'\"-`*")
    if len(bare) == 1:
        return Const(bare) if bare in "ei" else Sym(bare)
    lower = re.sub(r"\s+", " ", _ARTICLE.sub(" ", bare.lower().replace("-", " ").replace(".", ""))).strip()
    if _NO_SOLUTION.fullmatch(lower):
        return SetOf(())
    if _ALL_REALS.fullmatch(lower):
        return NamedSet("R")
    if lower in ("infinity", "infinite", "positive infinity"):
        return Const("inf")
    if lower in NUMBER_WORDS:
        return Num(Fraction(NUMBER_WORDS[lower]))
    return Text(_SYNONYMS.get(lower, lower) or bare.lower())


def make_choice(letter: str, rest: Node | None) -> Node:
    """A lettered option; without text it is the same as the letter."""
    return Sym(letter) if rest is None else Choice(letter, rest)
