"""Offline scoring: JSON lines in, JSON lines out, through the very workers the daemon uses.

In:  {"id", "kind": "math" | "stdin" | "function" | "assert", "response", "gold" | "tests", "program"?,
      "time_limit_s"?, "memory_mb"?}; without kind, gold means math and the shape of tests says which.
Out: {"id", "verdict", "score", "reason", "isolation", "elapsed_ms"} in the order of the input; score is null for
     unjudged and rejected. A line that cannot be read gives verdict "rejected", reason "bad_line", its number under
     "line" and what is wrong under "detail"; the rest is scored.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from protocol.config.services import RewarddSection
from rewardd.code.limits import MIN_MEMORY_MB
from rewardd.judge import Judge
from rewardd.pool import wait_readable
from rewardd.scorers import Outcome, Task, encode_truth
from rewardd.shaping import shape

WINDOW = 512


class Line(Struct, kw_only=True):
    """One input line; keys beyond these are ignored."""

    id: str | int | None = None
    kind: Literal["math", "stdin", "function", "assert"] | None = None
    response: str | None = None
    gold: str | int | float | list[str] | None = None
    tests: dict[str, Any] | None = None
    program: str | None = None
    time_limit_s: Annotated[float, Meta(gt=0)] | None = None
    memory_mb: Annotated[int, Meta(ge=MIN_MEMORY_MB)] | None = None


def task_of(line: Line) -> Task:
    """The task of a line; raises ValueError with what it lacks."""
    kind = line.kind or ("math" if line.gold is not None else None)
    if kind is None and line.tests is None:
        raise ValueError("none of kind, gold and tests is given")
    if line.response is None and line.program is None:
        raise ValueError("neither response nor program is given")
    if kind == "math":
        if line.gold is None:
            raise ValueError("kind math needs gold")
        return Task(scorer="math", response=line.response or "", truth=encode_truth(line.gold))
    if line.tests is None:
        raise ValueError(f"kind {kind} needs tests")
    extra: dict[str, Any] = {"kind": kind} if kind is not None else {}
    if line.program is not None:
        extra["program"] = line.program
    return Task(
        scorer="code",
        response=line.response or "",
        truth=encode_truth(line.tests),
        extra=extra,
        time_limit_s=line.time_limit_s,
        memory_mb=line.memory_mb,
    )


def _result(line_id: str | int | None, outcome: Outcome, scorer: str, section: RewarddSection) -> dict[str, Any]:
    verdict = shape(outcome, purpose="train", scorer=scorer, section=section.shaping)
    result: dict[str, Any] = {
        "id": line_id,
        "verdict": verdict.kind,
        "score": verdict.score if verdict.kind in ("correct", "partial", "wrong") else None,
        "reason": verdict.reason,
        "isolation": verdict.isolation,
        "elapsed_ms": round(verdict.elapsed_ms, 3),
    }
    return result | ({"detail": outcome.detail} if outcome.detail else {})


def score_lines(
    lines: Iterable[str | bytes],
    *,
    profile: Literal["strict", "or1-compat"] | None = None,
    section: RewarddSection | None = None,
) -> Iterator[dict[str, Any]]:
    """Score JSON lines; results come in input order, at most 512 lines behind.

    Args:
        profile: rules of the math verifier; default: the section's.
        section: workers, limits, isolation, shaping; default: the defaults of `rewardd`.

    Raises:
        CanaryFailed: a known pair came out wrong: no result can be trusted.
    """
    section = section or RewarddSection()
    if profile is not None:
        section = section.model_copy(update={"math": section.math.model_copy(update={"profile": profile})})
    decoder = msgspec.json.Decoder(Line)
    judge = Judge(section)
    waiting: dict[int, tuple[str | int | None, str]] = {}
    ready: dict[int, dict[str, Any]] = {}
    next_out = 0

    def collect(limit: int) -> Iterator[dict[str, Any]]:
        nonlocal next_out
        while True:
            while next_out in ready:
                yield ready.pop(next_out)
                next_out += 1
            if len(waiting) + len(ready) <= limit:
                return
            wait_readable(judge.fds(), judge.wait_s())
            for ticket, outcome in judge.turn():
                line_id, scorer = waiting.pop(ticket)
                ready[ticket] = _result(line_id, outcome, scorer, section)

    ticket = 0
    try:
        for number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            line_id: str | int | None = None
            try:
                line = decoder.decode(text)
                line_id = line.id
                task = task_of(line)
            except (msgspec.MsgspecError, ValueError) as error:
                ready[ticket] = {"id": line_id, "line": number, "verdict": "rejected", "score": None} | {
                    "reason": "bad_line", "isolation": "", "elapsed_ms": 0.0, "detail": f"line {number}: {error}"
                }  # fmt: skip
            else:
                waiting[ticket] = (line_id, task.scorer)
                judge.submit(ticket, task)
            ticket += 1
            yield from collect(WINDOW)
        yield from collect(0)
    finally:
        judge.close()
