"""Finds the answer a response commits to, in one pass over its text and without evaluating anything."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

FinalAnswer = Literal["auto", "boxed", "hash"]
MAX_TEXT = 256 * 1024
MAX_BOXES = 64

_THINK_END = "</think>"
_THINK_START = "<think>"
_BRACES = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{|\\(?:boxed|fbox)\s+(?P<bare>[^\s{}\\$]+)|\\.|[{}]", re.S)
_JOIN = re.compile(
    r"(?:\s|[$,;.&*:`(]|\\[()\[\]\\,;:! ]|\\(?:text|quad|qquad|lor|land|vee|mathrm)\b|[{}]|\band\b"
    r"|\bor\b|\beither\b|\bpossibly\b|\bmaybe\b|\bperhaps\b|\balso\b|\balternatively\b|\bboth\b|[A-Za-z](?:_\{?\w\}?)?\s*=)*",
)
_CHOICE = re.compile(
    r"[^.!?\n]*\b(?:or|alternatively|otherwise)\b[^.!?\n]*|[\s$)]*(?:if|when|for)\b[^.!?\n]*\band\b[\s$]*", re.I
)
_SECOND_THOUGHT = re.compile(
    r"[\s$*)\]\\]*[.,;?!(]?\s*(?:\\text\{)?\s*\bor\b(?:\s+(?:maybe|possibly|perhaps|else|even|also))*"
    r"[\s$\\({]*([-+]?\d[\d.,/]*)",
    re.I,
)
_DENIED = re.compile(r"(?:\bnot|rather than|instead of)[\s$(\\]*$")
_OR = re.compile(r"\b(?:or|possibly|maybe|perhaps|either|alternatively)\b|\\lor\b|\\vee\b")
_EQUALS = re.compile(r"([A-Za-z](?:_\{?\w\}?)?)\s*=\s*$")
_TAG = ("<answer>", "</answer>")
_HASH = re.compile(r"^\s*####[ \t]*(.*)$", re.M)
_STATEMENT = re.compile(
    r"\b(?:answers?|solutions?|result|value)\b[^\n.:=$]{0,60}?(?:\bis\b|\bare\b|\bequals\b|[:=])\s*:?\s*"
    r"|\banswers?\b\**\s*:\**\s*|\bfinal\s+answer\b[*:#_ \t]*\n",
    re.I,
)
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|\?")
_CONCLUSION = re.compile(
    r"\b(?:therefore|thus|hence|so|in conclusion|conclude|finally|in total|we get|we have|this gives)\b", re.I
)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.S)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$|\*)|\n|$")
_CLAUSE = re.compile(r"\s+(?:because|since|which|where|as|when|for which|by|due|given|after)\b|\s\(")
_NUMBER = re.compile(r"[-+−]?(?<![\w.])\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")
_HEDGED_STATEMENT = re.compile(
    r"\b(?:possible|potential|candidate|likely|plausible)\s+(?:final\s+)?(?:answers?|solutions?|values?|results?)\b",
    re.I,
)


class Extraction(msgspec.Struct, frozen=True):
    """`parts`: the boxes or the one text that state the answer; `joiner` is `or` or `,` between boxes.

    `alternative`: the last box with a percent sign that stands right behind it. `problem`: why there is no answer.
    """

    parts: tuple[str, ...] = ()
    joiner: str = ","
    alternative: str | None = None
    problem: str = ""


def after_thinking(text: str) -> tuple[str, bool]:
    """The text outside the reasoning, and whether a reasoning block was left open.

    The text up to the last `</think>` is dropped; so is everything from a `<think>` that never closes.
    """
    end = text.rfind(_THINK_END)
    if end >= 0:
        text = text[end + len(_THINK_END) :]
    start = text.find(_THINK_START)
    return (text, False) if start < 0 else (text[:start], True)


class _Box(msgspec.Struct):
    start: int
    end: int
    content: str


def find_boxes(text: str) -> tuple[list[_Box], bool]:
    """The last `MAX_BOXES` outermost boxes in order, and whether the last box was cut off. One pass."""
    boxes: list[_Box] = []
    stack: list[tuple[int, int] | None] = []
    open_boxes = 0
    cut_at = -1
    for match in _BRACES.finditer(text):
        token = match[0]
        if token == "{":
            stack.append(None)
        elif token == "}":
            if stack:
                opened = stack.pop()
                if opened is not None:
                    open_boxes -= 1
                    while boxes and boxes[-1].start > opened[0]:
                        boxes.pop()
                    boxes.append(_Box(opened[0], match.end(), text[opened[1] : match.start()]))
        elif token[0] == "\\" and token[-1] == "{" and len(token) > 2:
            stack.append((match.start(), match.end()))
            open_boxes += 1
            cut_at = match.start()
        elif match["bare"]:
            boxes.append(_Box(match.start(), match.end(), match["bare"]))
    unfinished = open_boxes > 0 and (not boxes or boxes[-1].start < cut_at)
    return boxes, unfinished


def from_boxes(text: str) -> Extraction | None:
    """The run of boxes that ends the text; None when there is no box at all."""
    first = text.find("\\boxed")
    if first < 0 and "\\fbox" not in text and "\\framebox" not in text:
        return None
    boxes, unfinished = find_boxes(text)
    if unfinished:
        return Extraction(problem="unfinished_box")
    while boxes and _DENIED.search(text, max(0, boxes[-1].start - 40), boxes[-1].start):
        boxes.pop()
    if not boxes:
        return Extraction(problem="no_answer") if first >= 0 else None
    run = [boxes[-1]]
    joiner = ","
    labels: list[str] = []
    for box in reversed(boxes[:-1]):
        between = text[box.end : run[-1].start]
        if len(between) > 80 or not (_JOIN.fullmatch(between) or _CHOICE.fullmatch(between)):
            break
        if _OR.search(between):
            joiner = "or"
        run.append(box)
        if len(run) >= MAX_BOXES:
            break
    run.reverse()
    if (
        joiner == ","
        and len(run) > 1
        and re.search(r"\beither\b[^.\n]*$", text[max(0, run[0].start - 60) : run[0].start])
    ):
        joiner = "or"
    parts = [box.content for box in run]
    if len(run) > 1:
        labels = [m[1] if (m := _EQUALS.search(text, max(0, box.start - 12), box.start)) else "" for box in run]
        if all(labels) and len(set(labels)) == len(labels):
            parts = [f"{label}={part}" for label, part in zip(labels, parts, strict=True)]
    unique = tuple(dict.fromkeys(part.strip() for part in parts))
    if all(not part for part in unique):
        return Extraction(problem="no_answer")
    second = _SECOND_THOUGHT.match(text, run[-1].end, run[-1].end + 60)
    if second:
        return Extraction((*unique, second[1].rstrip(".,")), "or")
    tail = text[run[-1].end : run[-1].end + 6].lstrip("$ \\)")
    alternative = f"{unique[-1]}\\%" if len(unique) == 1 and tail.startswith("%") else None
    return Extraction(unique, joiner, alternative)


def _statement(text: str) -> str:
    """The text of a closing statement up to the end of its sentence, formulas kept whole."""
    text = text.lstrip(" \t\r\n*:")
    formula = _FORMULA.match(text)
    if formula:
        end = formula.end()
        rest = _SENTENCE_END.search(text, end)
        tail = text[end : rest.start()] if rest else text[end:]
        clause = _CLAUSE.search(tail)
        return text[:end] + (tail[: clause.start()] if clause else tail)
    match = _SENTENCE_END.search(text)
    sentence = text[: match.start()] if match else text
    clause = _CLAUSE.search(sentence)
    return sentence[: clause.start()] if clause and clause.start() > 0 else sentence


def from_statement(text: str) -> Extraction:
    """`the answer is ...`, else the last formula or the only number of a concluding sentence."""
    tail = text[-4000:]
    alone = text.strip() if len(text) < 200 else ""
    if alone and len(alone) <= 80 and "\n" not in alone and not _PROSE.search(alone):
        return Extraction((alone,))
    statements = list(_STATEMENT.finditer(tail))
    last = statements[-1] if statements else None
    if last is not None and re.search(r"answer|solution|result", last[0], re.I):
        if _HEDGED_STATEMENT.search(tail, max(0, last.start() - 20), last.end()):
            return Extraction(problem="hedge")
        statement = _statement(tail[last.end() :]).strip()
        if statement:
            rest = tail.find(statement, last.end()) + len(statement)
            second = _SECOND_THOUGHT.match(tail, rest, rest + 60)
            return Extraction((statement, second[1].rstrip(".,")), "or") if second else Extraction((statement,))
    lines = [line for line in tail.rstrip().split("\n") if line.strip()]
    if not lines:
        return Extraction(problem="no_answer")
    block = lines[-1]
    sentences = [part for part in re.split(r"(?<=[.!?])\s+", block) if part.strip()]
    closing = sentences[-1] if sentences else block
    if not _CONCLUSION.search(closing):
        return Extraction(problem="no_answer")
    formulas = [next(g for g in groups if g) for groups in _FORMULA.findall(closing)]
    if formulas:
        return Extraction((formulas[-1].rsplit("=", 1)[-1] if formulas[-1].count("=") > 1 else formulas[-1],))
    if "=" in closing:
        return Extraction((closing.rsplit("=", 1)[-1].strip(" ."),))
    numbers = _NUMBER.findall(closing)
    return Extraction((numbers[0],)) if len(numbers) == 1 else Extraction(problem="no_answer")


def extract(response: str, *, require_box: bool = False, final_answer: FinalAnswer = "auto") -> Extraction:
    """The answer part of a response. `boxed` reads boxes only, `hash` only `#### x`, `auto` every convention."""
    text, unfinished = after_thinking(response[-MAX_TEXT:])
    missing = Extraction(problem="unfinished_reasoning" if unfinished else "no_answer")
    if final_answer != "hash":
        boxed = from_boxes(text)
        if boxed is not None:
            return boxed
        if require_box or final_answer == "boxed":
            return missing if unfinished else Extraction(problem="no_box")
        close = text.rfind(_TAG[1])
        start = text.rfind(_TAG[0], 0, close) if close >= 0 else -1
        if start >= 0:
            tagged = text[start + len(_TAG[0]) : close].strip()
            return Extraction((tagged,)) if tagged else missing
    marks = list(_HASH.finditer(text)) if "####" in text else []
    if marks and (final_answer == "hash" or not text[marks[-1].end() :].strip()) and marks[-1][1].strip():
        return Extraction((marks[-1][1].strip(),))
    if final_answer == "hash" or not text.strip():
        return missing
    found = from_statement(text)
    return missing if found.problem == "no_answer" else found
