"""`score`: offline scoring; see `rewardd.score_file` for the format of the lines."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from protocol.config.services import CodeSection, MathSection, RewarddSection
from protocol.errors import ExitStatus, UserError

Profile = Literal["strict", "or1-compat"]
Isolation = Literal["auto", "namespaces", "seccomp", "rlimits"]


def register(app: typer.Typer) -> None:
    """Add `score`."""
    app.command("score")(score)


def score(
    file: Annotated[Path, typer.Argument(help="JSON lines: id, response, gold or tests; - reads standard input.")],
    profile: Annotated[Profile, typer.Option(help="Rules of the math verifier.")] = "strict",
    require_box: Annotated[bool, typer.Option(help="Only a boxed answer counts.")] = False,
    isolation: Annotated[Isolation, typer.Option(help="Isolation of programs.")] = "auto",
    workers: Annotated[int, typer.Option(min=1, help="Worker processes per kind.")] = 1,
    out: Annotated[Path | None, typer.Option(help="File for the results; default: standard output.")] = None,
) -> int:
    """Score answers offline: JSON lines in, JSON lines out.

    Exit status 1 when a line could not be read or could not be judged (each is named on standard error).
    """
    from rewardd.score_file import score_lines

    section = RewarddSection(
        math=MathSection(profile=profile, require_box=require_box, num_workers=workers),
        code=CodeSection(isolation=isolation, num_workers=workers),
    )
    without = 0
    with _writer(out) as write:
        for result in score_lines(_lines(file), section=section):
            write(json.dumps(result))
            if result["score"] is None:
                without += result["verdict"] == "unjudged" or result["reason"] == "bad_line"
                typer.echo(_report(result), err=True)
    if without:
        typer.echo(f"{without} lines could not be read or judged", err=True)
    return int(ExitStatus.FAILED if without else ExitStatus.FINISHED)


def _report(result: dict[str, Any]) -> str:
    detail = result.get("detail") or result["reason"]
    return detail if "line" in result else f"{result['id']}: {result['verdict']}, {detail}"


@contextlib.contextmanager
def _writer(out: Path | None) -> Iterator[Callable[[str], object]]:
    """Writes lines to the file, or to standard output."""
    if out is None:
        yield typer.echo
        return
    try:
        file = out.open("w")
    except OSError as problem:
        raise UserError(f"cannot write {out}: {problem.strerror}") from None
    with file:
        yield lambda line: file.write(line + "\n")


def _lines(file: Path) -> Iterator[bytes]:
    if str(file) == "-":
        yield from sys.stdin.buffer
        return
    try:
        with file.open("rb") as lines:
            yield from lines
    except OSError as problem:
        raise UserError(f"cannot read {file}: {problem.strerror}") from None
