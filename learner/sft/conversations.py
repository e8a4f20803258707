"""Conversations to train on: token ids, the assistant's tokens, and the order in which batches take them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from learner.data.readers import CONVERSATIONS, read_rows
from learner.data.tokenization import PromptTokenizer
from learner.data.validation import messages_of
from protocol.errors import UserError


@dataclass(frozen=True)
class Conversation:
    """``token_ids`` int32 ``[N]``; ``own`` bool ``[N]``, true at the tokens the assistant wrote."""

    token_ids: np.ndarray
    own: np.ndarray


@dataclass
class Conversations:
    """The usable rows in file order, what was left out and why, and a hash of all of it."""

    rows: list[Conversation] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    content_hash: str = ""


def load_conversations(files: Sequence[str], *, tokenizer: PromptTokenizer, max_tokens: int) -> Conversations:
    """Reads column ``messages`` (a list of role and content) of parquet or JSON-lines files.

    Rows longer than ``max_tokens`` and rows without an answer are left out and listed. Raises UserError when a file
    cannot be read or nothing is left.
    """
    result = Conversations()
    digest = hashlib.sha256()
    for file in files:
        for number, row in enumerate(read_rows(file, table=CONVERSATIONS), start=1):
            try:
                messages = messages_of(row["messages"])
                if isinstance(messages, str):
                    raise ValueError(messages)
                ids, own = tokenizer.conversation(messages)
                if len(ids) > max_tokens:
                    raise ValueError(f"{len(ids)} tokens, a micro-batch holds {max_tokens}")
                if not any(own[1:]):
                    raise ValueError("the assistant's answer is empty")
            except ValueError as problem:
                result.left_out.append(f"{file}, row {number}: {problem}")
                continue
            conversation = Conversation(np.asarray(ids, np.int32), np.asarray(own, bool))
            digest.update(conversation.token_ids.tobytes() + conversation.own.tobytes())
            result.rows.append(conversation)
    if not result.rows:
        first = result.left_out[0] if result.left_out else "sft.files hold no rows"
        raise UserError(f"no conversation to train on: {first}")
    result.content_hash = digest.hexdigest()[:16]
    return result


def batch_rows(step: int, *, num_rows: int, batch_size: int, seed: int) -> list[int]:
    """Rows of the step-th batch (from 0): each epoch has an order of its own; only its last batch may be smaller."""
    per_epoch = steps_per_epoch(num_rows, batch_size=batch_size)
    epoch, place = divmod(step, per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(num_rows)
    return [int(i) for i in order[place * batch_size : (place + 1) * batch_size]]


def steps_per_epoch(num_rows: int, *, batch_size: int) -> int:
    """Optimizer steps in one pass."""
    return -(-num_rows // batch_size)
