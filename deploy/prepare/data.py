"""Procedural data sets: arithmetic drawn by reasoning-gym, written as parquet in the usual columns.

Columns: data_source (str), prompt (list of {role, content}), ability (str), reward_model {style, ground_truth},
extra_info {index, split}. Training and evaluation rows share no problem: a problem (its expression)
belongs to one side by a hash, whatever the seed.
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from protocol.errors import UserError

Split = Literal["train", "eval"]

_PHRASINGS = (
    'What is {e}? Reply with "The answer is" and a number.',
    'Calculate {e}. Reply with "The answer is" and a number.',
)
_EVAL_SHARE_PERCENT = 20
_MAX_FRUITLESS_DRAWS = 20_000


@dataclass(frozen=True, kw_only=True)
class Part:
    """One ingredient of a mix: a reasoning-gym data set with its settings, its share, and which draws to keep."""

    source: str
    share: float
    settings: dict[str, int]
    operators: str
    max_operand: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named mix of parts."""

    name: str
    description: str
    parts: tuple[Part, ...]


_ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
_TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="arithmetic",
            description="the demo's mix: sums, differences and products of small numbers",
            parts=(
                Part(source="chain_sum", share=0.75, settings=_TWO_DIGITS, operators="+-", max_operand=20),
                Part(source="products", share=0.25, settings=_ONE_DIGIT, operators="*", max_operand=9),
            ),
        ),
        Recipe(
            name="sums",
            description="sums and differences of two numbers with up to two digits",
            parts=(Part(source="chain_sum", share=1.0, settings=_TWO_DIGITS, operators="+-", max_operand=99),),
        ),
        Recipe(
            name="products",
            description="products of two numbers with up to two digits",
            parts=(Part(source="products", share=1.0, settings=_TWO_DIGITS, operators="*", max_operand=99),),
        ),
    )
}


def problem_split(expression: str) -> Split:
    """Which side a problem belongs to: 20 % of all expressions are held out, by a hash of the expression."""
    digest = hashlib.sha256(expression.encode()).digest()
    return "eval" if int.from_bytes(digest[:4], "little") % 100 < _EVAL_SHARE_PERCENT else "train"


def make_rows(recipe: Recipe, *, split: Split, num_rows: int, seed: int) -> list[dict[str, Any]]:
    """Draw `num_rows` distinct prompts of one split.

    Raises:
        UserError: the recipe does not have that many distinct prompts.
    """
    rng = Random(f"{recipe.name}/{split}/{seed}")
    rows: list[dict[str, Any]] = []
    for index, part in enumerate(recipe.parts):
        wanted = num_rows - len(rows) if index == len(recipe.parts) - 1 else round(num_rows * part.share)
        prompts = _distinct_prompts(part, split=split, wanted=wanted, seed=rng.randrange(2**31))
        if len(prompts) < wanted:
            raise UserError(
                f"recipe {recipe.name!r} has only {len(prompts)} distinct {split} prompts of {part.source}, "
                f"{wanted} were asked for: ask for fewer rows"
            )
        rows += [_row(recipe, part, question, answer, split) for question, answer in prompts.items()]
    rng.shuffle(rows)
    for index, row in enumerate(rows):
        row["extra_info"]["index"] = index
    return rows


def _distinct_prompts(part: Part, *, split: Split, wanted: int, seed: int) -> dict[str, str]:
    prompts: dict[str, str] = {}
    newest = 0
    for draw, (expression, answer) in enumerate(_draws(part, seed=seed)):
        if len(prompts) >= wanted or draw - newest > _MAX_FRUITLESS_DRAWS:
            break
        if problem_split(expression) == split and _wanted(part, expression, answer):
            for phrasing in _PHRASINGS[: wanted - len(prompts)]:
                question = phrasing.format(e=expression)
                newest = newest if question in prompts else draw
                prompts[question] = answer
    return prompts


def _wanted(part: Part, expression: str, answer: str) -> bool:
    left, operator, right = expression.split()
    return operator in part.operators and max(int(left), int(right)) <= part.max_operand and int(answer) >= 0


def _draws(part: Part, *, seed: int) -> Iterator[tuple[str, str]]:
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        raise UserError("procedural data needs reasoning-gym: pip install reasoning-gym") from error
    size = 20_000
    for block in itertools.count():
        for item in create_dataset(part.source, seed=seed + block * size, size=size, **part.settings):
            yield item["metadata"]["expression"], item["answer"]


def _row(recipe: Recipe, part: Part, question: str, answer: str, split: Split) -> dict[str, Any]:
    return {
        "data_source": f"{recipe.name}/{part.source}",
        # The empty system message keeps chat templates from adding a default one to every prompt.
        "prompt": [{"role": "system", "content": ""}, {"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": 0},
    }


def write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows to `path` (temporary file, then rename)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    pq.write_table(pa.Table.from_pylist(rows), scratch)
    scratch.replace(path)


def make_data(name: str, out: Path, *, num_train: int, num_eval: int, seed: int = 0) -> tuple[Path, Path]:
    """Write OUT/train.parquet and OUT/eval.parquet of the named recipe and return both paths.

    Raises:
        UserError: no such recipe, or it has fewer distinct prompts than asked for.
    """
    recipe = RECIPES.get(name)
    if recipe is None:
        raise UserError(f"no data recipe named {name!r}; there are: {', '.join(RECIPES)}")
    train, held_out = out / "train.parquet", out / "eval.parquet"
    write_parquet(make_rows(recipe, split="train", num_rows=num_train, seed=seed), train)
    write_parquet(make_rows(recipe, split="eval", num_rows=num_eval, seed=seed), held_out)
    return train, held_out
