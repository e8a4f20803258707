"""Chat template and tokenisation of prompts, and what the tokenizer says of the vocabulary and stop tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import UserError

Message = dict[str, str]


@dataclass(frozen=True)
class TokenizerFacts:
    """`vocab_size`: ids at or above it can't be tokens of an answer (the model's head may be wider).
    `stop_token_ids`: every end-of-sequence id of tokenizer and model, ascending."""

    vocab_size: int
    stop_token_ids: tuple[int, ...]


class PromptTokenizer:
    """Renders and tokenises prompts exactly as `apply_chat_template(..., add_generation_prompt=True)` does.

    Loads through `PreTrainedTokenizerFast` (never `AutoTokenizer`, which pulls in torch).
    """

    def __init__(self, folder: str | Path, *, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._folder = Path(folder)
        if not (self._folder / "tokenizer.json").is_file():
            raise UserError(f"{folder}/tokenizer.json does not exist; model.path or model.tokenizer_path must hold it")
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
        self._template_kwargs = dict(template_kwargs or {})

    def facts(self, model_folder: str | Path) -> TokenizerFacts:
        """Vocabulary size and stop ids; the model's config and generation config add their end-of-sequence ids."""
        stops: set[int] = set()
        if self._tokenizer.eos_token_id is not None:
            stops.add(int(self._tokenizer.eos_token_id))
        for name in ("config.json", "generation_config.json"):
            path = Path(model_folder) / name
            if path.is_file():
                value = json.loads(path.read_text()).get("eos_token_id")
                stops.update([value] if isinstance(value, int) else value or [])
        size = len(self._tokenizer)
        return TokenizerFacts(vocab_size=size, stop_token_ids=tuple(sorted(s for s in stops if s < size)))

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a prompt after the chat template; without a template, the contents joined by blank lines."""
        if self._tokenizer.chat_template is None:
            return "\n\n".join(message["content"] for message in messages)
        text = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **self._template_kwargs
        )
        assert isinstance(text, str)
        return text

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Token ids of a whole conversation, and which of them the assistant wrote: its content and the stop token.

        Template text around the answers (also what follows the stop token) is not the assistant's. A turn whose
        rendering depends on later turns (templates that drop earlier reasoning) counts as context. Raises ValueError
        when no turn is the assistant's.
        """
        template = self._tokenizer.apply_chat_template
        if self._tokenizer.chat_template is None:
            raise ValueError("the tokenizer has no chat template, so nothing says which text is the assistant's")
        whole = template(list(messages), tokenize=False, **self._template_kwargs)
        assert isinstance(whole, str)
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = template(
                list(messages[:number]), tokenize=False, add_generation_prompt=True, **self._template_kwargs
            )
            after = template(list(messages[: number + 1]), tokenize=False, **self._template_kwargs)
            assert isinstance(before, str) and isinstance(after, str)
            if whole.startswith(before) and whole.startswith(after):
                spans.append((len(before), len(after)))
        if not spans:
            raise ValueError("no turn is the assistant's, or the template does not render turns one after another")
        encoding = self._tokenizer.backend_tokenizer.encode(whole, add_special_tokens=False)
        return encoding.ids, self._own_tokens(encoding, spans)

    def _own_tokens(self, encoding: Any, spans: Sequence[tuple[int, int]]) -> list[bool]:
        own = [False] * len(encoding.ids)
        for begin, end in spans:
            for index, (start, stop) in enumerate(encoding.offsets):
                if begin <= start and stop <= end and start < stop:
                    own[index] = True
                    if encoding.ids[index] == self._tokenizer.eos_token_id:
                        break
        return own

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered prompts (the template holds the special tokens already)."""
        with_special = self._tokenizer.chat_template is None
        encodings = self._tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=with_special)
        return [encoding.ids for encoding in encodings]
