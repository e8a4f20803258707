"""What `slipstream data check` says about data files."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from learner.data.dataset import LeftOut, Prompt, PromptSet, load_prompts
from learner.data.readers import Row, read_rows
from learner.data.tokenization import PromptTokenizer
from learner.data.validation import decode_gold, plain

_SCHEMA_ROWS = 1000


@dataclass(frozen=True)
class DataReport:
    """Counts and lengths of data files, read as a run would read them.

    `schema` maps a column to its type in the first 1,000 rows of the first file; `prompt_tokens` is minimum, median,
    99th percentile and maximum after the chat template; `gold_kinds` counts forms of reference answers; `duplicates`
    are prompts that repeat an earlier one up to spaces and case; `overlap` those that the evaluation files hold too.
    """

    files: tuple[str, ...]
    num_rows: int
    num_usable: int
    content_hash: str
    schema: dict[str, str]
    by_source: dict[str, int]
    by_ability: dict[str, int]
    gold_kinds: dict[str, int]
    prompt_tokens: tuple[int, int, int, int]
    duplicates: list[str] = field(default_factory=list)
    overlap: list[str] | None = None
    left_out: list[LeftOut] = field(default_factory=list)

    def lines(self, *, max_listed: int = 20) -> list[str]:
        """The report as text; at most `max_listed` rows that are left out are named."""
        low, median, p99, high = self.prompt_tokens
        names = ", ".join(self.files)
        text = [f"{names}: {self.num_usable} of {self.num_rows} rows usable, content {self.content_hash}"]
        text += [f"column {name}: {kind}" for name, kind in self.schema.items()]
        text += [
            f"prompt tokens: min {low}, median {median}, p99 {p99}, max {high}",
            f"sources: {_counts(self.by_source)}",
            f"abilities: {_counts(self.by_ability)}",
            f"ground truths: {_counts(self.gold_kinds)}",
            f"duplicates: {len(self.duplicates)}{_named(self.duplicates)}",
        ]
        if self.overlap is not None:
            text.append(f"also in the evaluation files: {len(self.overlap)}{_named(self.overlap)}")
        kinds = Counter(item.kind for item in self.left_out)
        text.append(f"rows left out: {len(self.left_out)}" + (f" ({_counts(kinds)})" if kinds else ""))
        text += [f"left out: {item}" for item in self.left_out[:max_listed]]
        if len(self.left_out) > max_listed:
            text.append(f"left out: {len(self.left_out) - max_listed} more")
        return text


def check_files(
    files: Sequence[str], *, tokenizer_folder: str, max_prompt_tokens: int = 1 << 30, eval_files: Sequence[str] = ()
) -> DataReport:
    """Reads data files as a run would. Raises UserError when one cannot be read or no row is usable."""
    tokenizer = PromptTokenizer(tokenizer_folder)
    prompts = load_prompts(list(files), tokenizer=tokenizer, max_prompt_tokens=max_prompt_tokens)
    overlap = None
    if eval_files:
        held_out = load_prompts(list(eval_files), tokenizer=tokenizer, max_prompt_tokens=1 << 30)
        overlap = [prompt.prompt_id for prompt in prompts.overlap_with(held_out)]
    lengths = sorted(len(prompt.token_ids) for prompt in prompts.prompts)
    return DataReport(
        files=tuple(files),
        num_rows=len(prompts) + len(prompts.left_out),
        num_usable=len(prompts),
        content_hash=prompts.content_hash,
        schema=schema_of(list(islice(read_rows(files[0]), _SCHEMA_ROWS))),
        by_source=dict(Counter(prompt.data_source for prompt in prompts.prompts)),
        by_ability=dict(Counter(prompt.ability or "(none)" for prompt in prompts.prompts)),
        gold_kinds=dict(Counter(gold_kind(prompt) for prompt in prompts.prompts)),
        prompt_tokens=(lengths[0], lengths[len(lengths) // 2], lengths[int(0.99 * (len(lengths) - 1))], lengths[-1]),
        duplicates=_duplicates(prompts),
        overlap=overlap,
        left_out=prompts.left_out,
    )


def schema_of(rows: Sequence[Row]) -> dict[str, str]:
    """Arrow type of every column, or the Python types when a column mixes them."""
    import pyarrow as pa

    schema: dict[str, str] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [plain(row.get(name)) for row in rows]
        try:
            schema[name] = str(pa.array(values).type)
        except (pa.ArrowException, TypeError, ValueError):
            kinds = sorted({type(value).__name__ for value in values})
            schema[name] = f"mixed types within {' and '.join(kinds)}"
    return schema


def gold_kind(prompt: Prompt) -> str:
    """The form of a reference answer: text, number, list or object, the last two also as JSON in a text."""
    gold: Any = json.loads(prompt.payload)["ground_truth"]
    decoded = decode_gold(gold)
    names: dict[type, str] = {list: "list", dict: "object", str: "text"}
    kind = names.get(type(decoded), "number")
    return f"{kind} as JSON text" if isinstance(gold, str) and kind in ("list", "object") else kind


def _duplicates(prompts: PromptSet) -> list[str]:
    seen: set[bytes] = set()
    repeated: list[str] = []
    for prompt in prompts.prompts:
        if prompt.overlap in seen:
            repeated.append(prompt.prompt_id)
        seen.add(prompt.overlap)
    return repeated


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counts.items())


def _named(prompt_ids: list[str], *, max_listed: int = 5) -> str:
    if not prompt_ids:
        return ""
    return f", e.g. {', '.join(prompt_ids[:max_listed])}"
