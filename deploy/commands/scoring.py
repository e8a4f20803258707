"""`score`: offline scoring with the same scorers as the reward daemon. JSON lines in, JSON lines out, in order.

An input line holds `response` and the reference: `ground_truth` (or `gold`, `tests`, or `reward_model.ground_truth`),
and optionally `id`, `ability`, `data_source`, `time_limit_s`, `memory_mb`, `extra_info`. An output line holds `id` (or
the line number), `kind` (correct, partial, wrong, unjudged, rejected), `score`, `reason`, `scorer`, `elapsed_ms`.
"""

import json
import select
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from protocol.config.services import CodeSection, MathSection, RewarddSection
from protocol.errors import ExitStatus, UserError
from protocol.messages import GroundTruth

MAX_OPEN = 64
MAX_WAIT_S = 1.0


def register(app: typer.Typer) -> None:
    """Add `score`."""
    app.command("score")(score)


def score(
    file: Annotated[Path, typer.Argument(help="JSON lines with response and ground_truth; - reads standard input.")],
    profile: Annotated[str, typer.Option(help="Rules of the math verifier: strict or or1-compat.")] = "strict",
    require_box: Annotated[bool, typer.Option(help="Only a boxed answer counts.")] = False,
    isolation: Annotated[str, typer.Option(help="Isolation of programs: auto, namespaces, seccomp, rlimits.")] = "auto",
    workers: Annotated[int, typer.Option(min=1, help="Worker processes per kind.")] = 1,
) -> int:
    """Score answers offline. Exit status 0 only when every line got a verdict that counts."""
    if profile not in ("strict", "or1-compat"):
        raise UserError(f"no profile named {profile!r}: strict or or1-compat")
    if isolation not in ("auto", "namespaces", "seccomp", "rlimits"):
        raise UserError(f"no isolation named {isolation!r}: auto, namespaces, seccomp or rlimits")
    section = make_section(profile=profile, require_box=require_box, isolation=isolation, workers=workers)  # type: ignore[arg-type]
    unjudged = 0
    for verdict in score_lines(_lines(file), section=section):
        unjudged += verdict["kind"] in ("unjudged", "rejected")
        typer.echo(json.dumps(verdict))
    if unjudged:
        typer.echo(f"{unjudged} lines got no verdict that counts", err=True)
    return int(ExitStatus.FAILED if unjudged else ExitStatus.FINISHED)


def make_section(
    *,
    profile: Literal["strict", "or1-compat"],
    require_box: bool = False,
    isolation: Literal["auto", "namespaces", "seccomp", "rlimits"] = "auto",
    workers: int = 1,
) -> RewarddSection:
    """The `rewardd` section that `score` stands for."""
    return RewarddSection(
        math=MathSection(profile=profile, require_box=require_box, num_workers=workers),
        code=CodeSection(isolation=isolation, num_workers=workers),
        cache_entries=0,
    )


def score_lines(lines: Iterator[str], *, section: RewarddSection) -> Iterator[dict[str, Any]]:
    """One verdict per line, in the order of the lines; at most 64 lines are held at a time.

    Raises:
        CanaryFailed: a known pair came out wrong, so no verdict could be trusted.
    """
    from rewardd.judge import Judge

    waiting: dict[int, dict[str, Any] | None] = {}
    ids: dict[int, Any] = {}
    next_out = 0
    with closing(Judge(section)) as judge:
        for ticket, line in enumerate(lines):
            ids[ticket], task = read_task(line, number=ticket + 1)
            waiting[ticket] = None
            if isinstance(task, str):
                waiting[ticket] = {"id": ids[ticket], "kind": "rejected", "score": 0.0, "reason": task}
            else:
                judge.submit(ticket, task)
            while len(waiting) >= MAX_OPEN and waiting[next_out] is None:
                _turn(judge, waiting, ids, section)
            while (done := waiting.get(next_out)) is not None:
                yield done
                del waiting[next_out], ids[next_out]
                next_out += 1
        while waiting:
            while (done := waiting.get(next_out)) is None:
                _turn(judge, waiting, ids, section)
            yield done
            del waiting[next_out], ids[next_out]
            next_out += 1


def _turn(judge: Any, waiting: dict[int, dict[str, Any] | None], ids: dict[int, Any], section: RewarddSection) -> None:
    from rewardd.shaping import shape

    select.select(judge.fds(), [], [], min(MAX_WAIT_S, judge.wait_s()))
    for ticket, outcome in judge.turn():
        verdict = msgspec.to_builtins(shape(outcome, purpose="eval", scorer="", section=section.shaping))
        verdict = {
            key: verdict[key] for key in ("kind", "score", "reason", "elapsed_ms", "isolation") if key in verdict
        }
        waiting[ticket] = {"id": ids[ticket], **verdict} | ({"detail": outcome.detail} if outcome.detail else {})


def read_task(line: str, *, number: int) -> tuple[Any, Any]:
    """(id, rewardd Task) of an input line, or (id, why it cannot be scored)."""
    from rewardd.routing import route
    from rewardd.scorers import Task

    try:
        row = json.loads(line)
        response = row["response"]
    except (ValueError, KeyError, TypeError):
        return number, "not a JSON object with a response"
    identity = row.get("id", number)
    model = row.get("reward_model") or {}
    truth = next((row[key] for key in ("ground_truth", "gold", "tests") if key in row), model.get("ground_truth"))
    extra = dict(row.get("extra_info") or {})
    if row.get("program") is not None:
        extra["program"] = row["program"]
    item = GroundTruth(
        prompt_id=str(identity),
        data_source=str(row.get("data_source", "")),
        ability=str(row.get("ability", "")),
        payload=json.dumps({"ground_truth": truth, "extra_info": extra}),
    )
    routed = route(item, overrides={})
    if routed.problem or not isinstance(response, str):
        return identity, routed.problem or "response is not text"
    return identity, Task(
        scorer=routed.scorer,
        response=response,
        truth=routed.truth,
        extra=routed.extra,
        time_limit_s=row.get("time_limit_s"),
        memory_mb=row.get("memory_mb"),
    )


def _lines(file: Path) -> Iterator[str]:
    if str(file) == "-":
        yield from (line for line in sys.stdin if line.strip())
        return
    try:
        with file.open() as lines:
            yield from (line for line in lines if line.strip())
    except OSError as problem:
        raise UserError(f"cannot read {file}: {problem.strerror}") from None
