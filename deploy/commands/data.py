"""`data make` and `data check`."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.prepare.data import RECIPES, make_data
from deploy.prepare.model import MODEL_NAME, cache_dir
from protocol.errors import ExitStatus


def register(app: typer.Typer) -> None:
    """Add the `data` group."""
    group = typer.Typer(help="Make and check data sets.", no_args_is_help=True)
    group.command("make")(make)
    group.command("check")(check)
    app.add_typer(group, name="data")


def make(
    name: Annotated[str, typer.Argument(help=f"Recipe: {', '.join(RECIPES)}.")],
    out: Annotated[Path, typer.Argument(help="Folder for train.parquet and eval.parquet.")],
    train: Annotated[int, typer.Option(help="Training prompts.")] = 512,
    held_out: Annotated[int, typer.Option("--eval", help="Held-out prompts.")] = 96,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
) -> None:
    """Make a procedural data set with disjoint training and evaluation problems."""
    for path in make_data(name, out, num_train=train, num_eval=held_out, seed=seed):
        typer.echo(str(path))


def check(
    files: Annotated[list[str], typer.Argument(help="Parquet, JSON lines or pickled rows; paths or s3://, hdfs://.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer folder; default: the demo's model.")] = None,
    max_prompt_tokens: Annotated[int, typer.Option(help="Limit to compare prompt lengths with.")] = 1024,
    against: Annotated[list[str] | None, typer.Option(help="Evaluation file to look for overlap with.")] = None,
) -> int:
    """Read data files as a run would: schema, lengths, ground truths, duplicates, overlap, rows left out and why."""
    from learner.data.report import check_files

    folder = tokenizer or cache_dir() / MODEL_NAME
    report = check_files(
        files, tokenizer_folder=str(folder), max_prompt_tokens=max_prompt_tokens, eval_files=against or []
    )
    for line in report.lines():
        typer.echo(line)
    return int(ExitStatus.CONFIG if report.left_out or report.overlap else ExitStatus.FINISHED)
