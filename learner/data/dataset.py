"""A validated, tokenised set of prompts with stable ids and a content hash."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.data.readers import Row, read_rows
from learner.data.tokenization import Message, PromptTokenizer
from learner.data.validation import (
    GoldCheck,
    check_reward_model,
    default_math_gold,
    messages_of,
    overlap_key,
    plain,
)
from protocol.errors import UserError

_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `token_ids` int32 [P] after the chat template; `payload` is the JSON a reward daemon needs."""

    prompt_id: str
    data_source: str
    ability: str
    token_ids: NDArray[np.int32]
    payload: str
    overlap: bytes


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that is not used. `row` counts from 1 in its file; `kind`: empty | over_limit | bad_gold | bad_prompt."""

    file: str
    row: int
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.reason}"


@dataclass
class PromptSet:
    """Prompts in file order. `content_hash` changes with any usable row, its order, or the tokenisation."""

    prompts: list[Prompt] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    content_hash: str = ""

    def __len__(self) -> int:
        return len(self.prompts)

    def left_out_counts(self) -> dict[str, int]:
        """Rows left out, by kind."""
        return dict(Counter(item.kind for item in self.left_out))

    def overlap_with(self, other: "PromptSet") -> list[Prompt]:
        """The prompts of this set that `other` holds too, up to spaces and case."""
        keys = {prompt.overlap for prompt in other.prompts}
        return [prompt for prompt in self.prompts if prompt.overlap in keys]


def load_prompts(
    files: Sequence[str | list[Row]],
    *,
    tokenizer: PromptTokenizer,
    max_prompt_tokens: int,
    math_gold: GoldCheck | None = None,
) -> PromptSet:
    """Reads, validates and tokenises all rows of `files` (addresses, or lists of rows).

    Rows that cannot be used are listed in `left_out`, never cut (B80, B81). Raises UserError when a file cannot be
    read or no row is left.
    """
    result = PromptSet()
    builder = _Builder(result, tokenizer, max_prompt_tokens, math_gold or default_math_gold())
    for source in files:
        name, rows = (source, read_rows(source)) if isinstance(source, str) else ("<list>", iter(source))
        for first, chunk in _chunks(rows):
            builder.add(name, first, chunk)
    result.content_hash = builder.hash.hexdigest()[:16]
    if not result.prompts:
        kinds = ", ".join(f"{n} {kind}" for kind, n in result.left_out_counts().items()) or "the files hold no rows"
        raise UserError(f"no usable prompt in {', '.join(str(f) for f in files if isinstance(f, str))}: {kinds}")
    return result


def check_overlap(train: PromptSet, evaluation: PromptSet, *, max_fraction: float) -> list[Prompt]:
    """Evaluation prompts that are in the training data too (B82). Raises UserError above `max_fraction`."""
    common = evaluation.overlap_with(train)
    fraction = len(common) / max(1, len(evaluation))
    if fraction > max_fraction:
        raise UserError(
            f"{len(common)} of {len(evaluation)} evaluation prompts ({fraction:.1%}) are in the training data, e.g. "
            f"{common[0].prompt_id}; remove them or raise data.max_eval_overlap (now {max_fraction})"
        )
    return common


class _Builder:
    def __init__(self, result: PromptSet, tokenizer: PromptTokenizer, max_tokens: int, math_gold: GoldCheck) -> None:
        self.hash = hashlib.sha256()
        self._result = result
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._math_gold = math_gold
        self._seen: Counter[str] = Counter()

    def add(self, file: str, first: int, rows: list[Row]) -> None:
        usable: list[tuple[int, Row, list[Message]]] = []
        for number, row in enumerate(rows, start=first):
            messages = messages_of(row.get("prompt"))
            if isinstance(messages, str):
                kind = "empty" if "empty" in messages else "bad_prompt"
                self._result.left_out.append(LeftOut(file, number, kind, messages))
                continue
            ability = str(row.get("ability") or "")
            reason = check_reward_model(plain(row.get("reward_model")), ability=ability, math_gold=self._math_gold)
            if reason is not None:
                self._result.left_out.append(LeftOut(file, number, "bad_gold", reason))
                continue
            usable.append((number, row, messages))
        encoded = self._tokenizer.encode([self._tokenizer.render(messages) for _, _, messages in usable])
        for (number, row, messages), ids in zip(usable, encoded, strict=True):
            if len(ids) > self._max_tokens:
                reason = f"the prompt has {len(ids)} tokens, over data.max_prompt_tokens = {self._max_tokens}"
                self._result.left_out.append(LeftOut(file, number, "over_limit", reason))
            else:
                self._append(row, messages, ids)

    def _append(self, row: Row, messages: list[Message], ids: list[int]) -> None:
        reward_model = plain(row["reward_model"])
        payload = _json(
            {
                "style": str(reward_model.get("style") or "rule"),
                "ground_truth": reward_model["ground_truth"],
                "extra_info": plain(row.get("extra_info") or {}),
                "prompt": messages,
            }
        )
        data_source = str(row.get("data_source") or "unknown")
        identity = _json([data_source, messages, reward_model["ground_truth"]])
        prompt_id = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._seen[prompt_id] += 1
        if self._seen[prompt_id] > 1:
            prompt_id = f"{prompt_id}-{self._seen[prompt_id]}"
        prompt = Prompt(
            prompt_id=prompt_id,
            data_source=data_source,
            ability=str(row.get("ability") or ""),
            token_ids=np.asarray(ids, dtype=np.int32),
            payload=payload,
            overlap=hashlib.sha256(overlap_key(messages).encode()).digest()[:16],
        )
        self.hash.update(prompt_id.encode() + payload.encode() + prompt.token_ids.tobytes())
        self._result.prompts.append(prompt)


def _chunks(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    chunk: list[Row] = []
    first = 1
    for row in rows:
        chunk.append(row)
        if len(chunk) == _CHUNK:
            yield first, chunk
            first, chunk = first + len(chunk), []
    if chunk:
        yield first, chunk


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
