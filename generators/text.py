"""From token ids to text, for scoring and environments; from an environment's text to ids; which ids exist at all."""

from functools import cache

import numpy as np

from protocol.errors import UserError


class Decoder:
    """The run's tokenizer (loaded without torch)."""

    def __init__(self, folder: str) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.num_ids = max(self._tokenizer.get_vocab().values()) + 1
        self._frame = cache(self._make_frame)

    def text(self, token_ids: np.ndarray) -> str:
        """Text of a response, special tokens left out."""
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def raw_text(self, token_ids: list[int]) -> str:
        """Text with its special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def observation_ids(self, text: str, *, role: str | None) -> list[int]:
        """Token ids that follow the policy's turn when an environment says `text`; with a role as a chat message.

        Raises:
            UserError: the chat template cannot put a message of this role after an assistant's.
        """
        if role is not None:
            before, after = self._frame(role)
            text = before + text + after
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _make_frame(self, role: str) -> tuple[str, str]:
        """What the chat template puts before and after a message that follows the end of an assistant's."""
        said, told = "\x00said\x00", "\x00told\x00"
        messages = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": said},
            {"role": role, "content": told},
        ]
        try:
            text = str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:
            raise UserError(f"the chat template takes no {role!r} message after an assistant's: {error}") from error
        if said not in text or told not in text:
            raise UserError(f"the chat template leaves out a {role!r} message: choose another role, or None")
        between, after = text.split(said, 1)[1].split(told, 1)
        end = self._tokenizer.eos_token or ""
        return (between.split(end, 1)[1] if end and end in between else between), after

    def problem_of(self, token_ids: np.ndarray) -> str:
        """Why an answer cannot be trained on: "" | it is empty | it holds an id the tokenizer does not know."""
        if token_ids.size == 0:
            return "the answer has no token"
        if int(token_ids.max()) >= self.num_ids or int(token_ids.min()) < 0:
            return f"token id {int(token_ids.max())} is beyond the tokenizer's {self.num_ids}"
        return ""
