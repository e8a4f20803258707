"""`score`: offline scoring; see `rewardd.score_file` for the format of the lines."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

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
) -> int:
    """Score answers offline: JSON lines in, JSON lines out. Exit status 0 only when every line got a verdict."""
    from rewardd.score_file import score_lines

    section = RewarddSection(
        math=MathSection(profile=profile, require_box=require_box, num_workers=workers),
        code=CodeSection(isolation=isolation, num_workers=workers),
    )
    without = 0
    for result in score_lines(_lines(file), section=section):
        without += result["score"] is None
        typer.echo(json.dumps(result))
    if without:
        typer.echo(f"{without} lines got no verdict", err=True)
    return int(ExitStatus.FAILED if without else ExitStatus.FINISHED)


def _lines(file: Path) -> Iterator[str]:
    if str(file) == "-":
        yield from sys.stdin
        return
    try:
        with file.open() as lines:
            yield from lines
    except OSError as problem:
        raise UserError(f"cannot read {file}: {problem.strerror}") from None
