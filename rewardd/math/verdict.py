"""The verdict on a response: extraction, equal strings, exact comparison, symbolic comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from rewardd.math import symbolic
from rewardd.math.errors import TooComplex, Undefined, VerifierFault
from rewardd.math.extract import Extraction, FinalAnswer, extract
from rewardd.math.nodes import Listing, Node, Opaque, renamed
from rewardd.math.reading import Reading, read, read_gold
from rewardd.math.structure import Comparison

Profile = Literal["strict", "or1-compat"]
Path = Literal["exact", "symbolic", "none"]
_KEPT = 512


class MathResult(msgspec.Struct, frozen=True):
    """Verdict on one response.

    `reason` is a short slug; `answer` the extracted answer text (at most 512 characters); `path` the stage that decided
    (`none`: there was nothing to compare).
    """

    correct: bool
    reason: str
    answer: str | None
    path: Path


class _Undecided(Exception):
    """The exact stage cannot tell."""


def verify(
    response: str,
    *,
    gold: str | list[str],
    profile: Profile = "strict",
    require_box: bool = False,
    final_answer: FinalAnswer = "auto",
) -> MathResult:
    """Judges a response against one reference answer or any of several.

    Args:
        response: what the model wrote, with or without its reasoning block.
        gold: the reference, or alternatives of which any counts.
        profile: `strict` follows the mathematical rules; `or1-compat` repeats the grader of Skywork-OR1.
        require_box: only a box is an answer.
        final_answer: where to look: `boxed`, `hash` (`#### x`) or `auto` (box, `<answer>`, `####`, closing sentence).

    Raises:
        ValueError: an unknown profile or convention, or no reference.
        VerifierFault: the verifier failed; never a statement about the answer.
    """
    golds = _golds(gold, profile, final_answer)
    try:
        if profile == "or1-compat":
            from rewardd.math import or1

            return or1.verify(response, golds)
        found = extract(response, require_box=require_box, final_answer=final_answer)
        return _judge(found, golds, exact_only=False)
    except Exception as error:
        raise VerifierFault(
            f"math verifier failed on reference {golds[0]!r:.80}: {type(error).__name__}: {error}"
        ) from error


def exact_verdict(
    response: str,
    *,
    gold: str | list[str],
    require_box: bool = False,
    final_answer: FinalAnswer = "auto",
) -> MathResult | None:
    """The verdict of the `strict` profile where exact arithmetic suffices, None where `verify` needs its slow stage.

    Imports neither sympy nor mpmath. Raises as `verify`.
    """
    golds = _golds(gold, "strict", final_answer)
    try:
        return _judge(extract(response, require_box=require_box, final_answer=final_answer), golds, exact_only=True)
    except _Undecided:
        return None
    except Exception as error:
        raise VerifierFault(
            f"math verifier failed on reference {golds[0]!r:.80}: {type(error).__name__}: {error}"
        ) from error


def _golds(gold: str | Sequence[str], profile: str, final_answer: str) -> list[str]:
    if profile not in ("strict", "or1-compat"):
        raise ValueError(f"unknown profile {profile!r}: use 'strict' or 'or1-compat'")
    if final_answer not in ("auto", "boxed", "hash"):
        raise ValueError(f"unknown final_answer {final_answer!r}: use 'auto', 'boxed' or 'hash'")
    golds = [gold] if isinstance(gold, str) else list(gold)
    if not golds or not all(isinstance(g, str) and g.strip() for g in golds):
        raise ValueError(f"gold must be text or a list of texts, none of them empty, not {gold!r:.80}")
    return golds


def _judge(found: Extraction, golds: list[str], *, exact_only: bool) -> MathResult:
    if found.problem:
        return MathResult(False, found.problem, None, "none")
    shown = " , ".join(found.parts)[:_KEPT]
    candidates = [found] if found.alternative is None else [found, Extraction((found.alternative,))]
    result = MathResult(False, "no_answer", shown, "none")
    undecided = False
    for candidate in candidates:
        for gold in golds:
            try:
                result = _compare(candidate, read_gold(gold), shown, exact_only)
            except _Undecided:
                undecided = True
                continue
            if result.correct:
                return result
    if undecided:
        raise _Undecided
    return result


def _compare(found: Extraction, gold: Reading, shown: str, exact_only: bool) -> MathResult:
    parts = [read(part) for part in found.parts]
    if len(parts) == 1 and parts[0].key == gold.key and gold.key:
        return MathResult(True, "equal_string", shown, "exact")
    answers, problem = _answers(parts, found.joiner)
    if not answers:
        return MathResult(False, problem, shown, "none" if problem == "no_answer" else "exact")
    if not gold.nodes:
        return MathResult(False, "gold_" + (gold.problem or "unreadable"), shown, "exact")
    reason = problem or "different"
    undecided = False
    used_symbolic = False
    if len(parts) == 1 and gold.parameter and parts[0].parameter:
        answers = [renamed(answer, parts[0].parameter, gold.parameter) for answer in answers]
    for expected in gold.nodes:
        for answer in answers:
            verdict, reason = _compare_nodes(expected, answer, symbolic_stage=False)
            if verdict is None and not exact_only:
                used_symbolic = True
                verdict, reason = _compare_nodes(expected, answer, symbolic_stage=True)
            if verdict:
                return MathResult(True, reason, shown, "symbolic" if used_symbolic else "exact")
            undecided = undecided or verdict is None
    if undecided and exact_only:
        raise _Undecided
    if undecided and len(parts) == 1:
        verdict = symbolic.compare_texts(gold.key, parts[0].key)
        if verdict is not None:
            return MathResult(verdict, "symbolic" if verdict else "different", shown, "symbolic")
        reason = "unparsed" if any(isinstance(n, Opaque) for n in (*answers, *gold.nodes)) else "undecided"
    return MathResult(False, reason, shown, "symbolic" if used_symbolic else "exact")


def _answers(parts: list[Reading], joiner: str) -> tuple[list[Node], str]:
    """The readings of a run of boxes as one list, or of the single answer."""
    if len(parts) == 1:
        return list(parts[0].nodes), parts[0].problem
    problem = next((part.problem for part in parts if not part.nodes), "")
    if problem:
        return [], problem
    items: list[Node] = []
    for part in parts:
        node = part.nodes[0]
        items.extend(node.items if isinstance(node, Listing) else (node,))
    return [Listing(tuple(items), joiner)], ""


def _compare_nodes(gold: Node, answer: Node, *, symbolic_stage: bool) -> tuple[bool | None, str]:
    comparison = Comparison(symbolic.leaf if symbolic_stage else symbolic.exact_leaf)
    try:
        verdict = comparison.equal(gold, answer)
    except TooComplex:
        return False, "too_complex"
    except Undefined:
        return False, "undefined"
    if verdict:
        return True, "symbolic" if symbolic_stage else "exact_value"
    return verdict, comparison.reason
