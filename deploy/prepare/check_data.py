"""`slipstream data check`: every row of a data file, without a model."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.errors import UserError

SHOWN = 20


@dataclass
class DataReport:
    """What was found in one file. Problems are (row number, what)."""

    path: Path
    num_rows: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    problems: list[tuple[int, str]] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """No row has a problem and there is at least one."""
        return not self.problems and self.num_rows > 0

    def lines(self) -> Iterator[str]:
        """The report for a person."""
        sources = ", ".join(f"{name} {count}" for name, count in self.sources.most_common())
        yield f"{self.path}: {self.num_rows} rows ({sources})"
        if self.prompt_tokens:
            ordered = sorted(self.prompt_tokens)
            yield f"prompt tokens: median {ordered[len(ordered) // 2]}, longest {ordered[-1]}"
        for row, what in self.problems[:SHOWN]:
            yield f"row {row}: {what}"
        if len(self.problems) > SHOWN:
            yield f"... and {len(self.problems) - SHOWN} more rows with problems"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a parquet or JSON-lines file; a line that is not an object becomes {"_error": why}.

    Raises:
        UserError: the file cannot be read.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        except pa.ArrowException as problem:
            raise UserError(f"{path} is not readable as parquet: {problem}") from None
        return rows
    return [_json_row(line) for line in path.read_text().splitlines() if line.strip()]


def _json_row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as problem:
        return {"_error": f"is not JSON ({problem})"}
    return row if isinstance(row, dict) else {"_error": "is not a JSON object"}


def row_problem(row: dict[str, Any]) -> str | None:
    """What makes a row unusable, or None."""
    if "_error" in row:
        return str(row["_error"])
    if not isinstance(row.get("data_source"), str) or not row["data_source"]:
        return "data_source is missing"
    prompt = row.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        return "prompt is not a list of messages"
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or not message.get("role"):
            return "prompt holds a message without role or content"
    if not any(message["content"].strip() for message in prompt if message["role"] == "user"):
        return "prompt has no text from the user"
    model = row.get("reward_model")
    if not isinstance(model, dict):
        return "reward_model is missing"
    truth = model.get("ground_truth")
    if truth is None or not str(truth).strip():
        return "reward_model.ground_truth is missing"
    return None


def check_file(path: Path, *, tokenizer: Path | None = None, max_prompt_tokens: int = 1024) -> DataReport:
    """Check every row; with a tokenizer folder also count prompt tokens after the chat template."""
    report = DataReport(path)
    count_tokens = _token_counter(tokenizer) if tokenizer else None
    seen: dict[str, int] = {}
    for number, row in enumerate(read_rows(path)):
        report.num_rows += 1
        problem = row_problem(row)
        if problem is None:
            report.sources[row["data_source"]] += 1
            key = json.dumps([row["prompt"], row["reward_model"]["ground_truth"]], sort_keys=True)
            problem = f"repeats row {seen[key]}" if key in seen else None
            seen.setdefault(key, number)
            if count_tokens is not None:
                report.prompt_tokens.append(count_tokens(row["prompt"]))
                if report.prompt_tokens[-1] > max_prompt_tokens:
                    problem = f"prompt has {report.prompt_tokens[-1]} tokens, the limit is {max_prompt_tokens}"
        if problem is not None:
            report.problems.append((number, problem))
    return report


def _token_counter(folder: Path) -> Callable[[list[dict[str, str]]], int]:
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} holds no tokenizer.json")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def count(prompt: list[dict[str, str]]) -> int:
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    return count
