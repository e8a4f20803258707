"""From token ids to text, for scoring only; and which ids exist at all."""

import numpy as np


class Decoder:
    """The run's tokenizer (loaded without torch)."""

    def __init__(self, folder: str) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.num_ids = max(self._tokenizer.get_vocab().values()) + 1

    def text(self, token_ids: np.ndarray) -> str:
        """Text of a response, special tokens left out."""
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def problem_of(self, token_ids: np.ndarray) -> str:
        """Why an answer cannot be trained on: "" | it is empty | it holds an id the tokenizer does not know."""
        if token_ids.size == 0:
            return "the answer has no token"
        if int(token_ids.max()) >= self.num_ids or int(token_ids.min()) < 0:
            return f"token id {int(token_ids.max())} is beyond the tokenizer's {self.num_ids}"
        return ""
