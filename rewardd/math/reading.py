"""From the text of an answer to its readings (syntax trees)."""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from rewardd.math import shapes, words
from rewardd.math.errors import Hedge, TooComplex, Unparsed
from rewardd.math.nodes import NamedSet, Node, Opaque, SetOf, SetOp, Text
from rewardd.math.normalize import canonical, clean
from rewardd.math.parser import Parser

MAX_LENGTH = 2000
_COMMA_NUMBER = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,]|\.\d*,)")
_PLAIN_THOUSANDS = re.compile(r"(?<![\d.])(\d{1,3})((?:,\d{3})+)(?!\d)")
_PARAMETER = re.compile(
    r"(?:\s|\\[ ,;])*(?:,|;|\(|\\quad|\\text\s*\{\s*(?:,|for|where)?[^{}]*\})"
    r"[\s\\,;(]*([A-Za-z])\s*\\in\s*\\mathbb\s*\{?[ZN]\}?\s*\)?$"
)
_EXCEPT = re.compile(
    r"(?:all |the )?real numbers (?:except|other than|not equal to)(?: for)?\s*(?:x\s*=\s*)?(.+)", re.I
)
_OPENING = re.compile(r"\(|\[|\\\{|\\langle|\\lbrace|\\begin")
_CLOSING = re.compile(r"\)|\]|\\\}|\\rangle|\\rbrace|\\end")


class Reading(msgspec.Struct, frozen=True):
    """One answer text: its plain spelling, its trees (the likelier first), and why there are none."""

    text: str
    key: str
    nodes: tuple[Node, ...] = ()
    problem: str = ""
    parameter: str = ""


def _merge_thousands(text: str) -> str:
    """Joins `1,250` outside brackets, where a comma separates elements."""
    parts: list[str] = []
    last = 0
    for match in _PLAIN_THOUSANDS.finditer(text):
        before = text[: match.start()]
        if len(_OPENING.findall(before)) > len(_CLOSING.findall(before)):
            continue
        parts.append(text[last : match.start()] + match[1] + match[2].replace(",", ""))
        last = match.end()
    return "".join(parts) + text[last:]


def _parse(text: str) -> Node:
    choice = words.read_choice(text)
    if choice is not None:
        letter, rest = choice
        if not rest:
            return words.make_choice(letter, None)
        try:
            return words.make_choice(letter, words.read_words(rest) or Parser(rest).answer())
        except Unparsed:
            return words.make_choice(letter, Text(rest.lower()))
    hole = _EXCEPT.fullmatch(words.plain(text)) if "real" in text else None
    if hole is not None:
        return SetOp("minus", NamedSet("R"), SetOf(shapes.members(Parser(hole[1]).answer())))
    node = words.read_words(text)
    return node if node is not None else Parser(text).answer()


def read(text: str) -> Reading:
    """All readings of an answer text. Never raises: an unreadable text has no nodes and a `problem`."""
    if len(text) > MAX_LENGTH:
        return Reading(text, " ".join(text.split()), (), "too_complex")
    cleaned = clean(text)
    key = canonical(cleaned)
    if not key:
        return Reading(text, key, (), "no_answer")
    parameter = ""
    if (condition := _PARAMETER.search(cleaned)) and re.search(
        rf"(?<![A-Za-z\\]){condition[1]}", cleaned[: condition.start()]
    ):
        parameter, cleaned = condition[1], cleaned[: condition.start()]
    spellings = [cleaned]
    if "," in cleaned:
        merged = _merge_thousands(cleaned)
        if merged != cleaned:
            spellings = [merged, cleaned]
    nodes: list[Node] = []
    problem = ""
    for spelling in spellings:
        try:
            nodes.append(_parse(spelling))
        except Hedge:
            problem = problem or "hedge"
        except TooComplex:
            problem = "too_complex"
        except Unparsed:
            problem = problem or "unparsed"
    if not nodes and problem == "unparsed":
        nodes.append(Opaque(key))
    return Reading(text, key, tuple(nodes), problem, parameter)


@lru_cache(maxsize=4096)
def read_gold(text: str) -> Reading:
    """`read` with a cache: one reference is compared with every response of its group."""
    return read(text)
