"""What `slipstream data check FILE` says about a file."""

from collections import Counter
from dataclasses import dataclass, field

from learner.data.dataset import LeftOut, load_prompts
from learner.data.tokenization import PromptTokenizer


@dataclass(frozen=True)
class DataReport:
    """Counts and lengths of a data file. `prompt_tokens`: minimum, median, 99th percentile, maximum."""

    file: str
    num_rows: int
    num_usable: int
    content_hash: str
    by_source: dict[str, int]
    by_ability: dict[str, int]
    prompt_tokens: tuple[int, int, int, int]
    left_out: list[LeftOut] = field(default_factory=list)

    def lines(self, *, max_listed: int = 20) -> list[str]:
        """The report as text; at most `max_listed` rows that are left out are named."""
        low, median, p99, high = self.prompt_tokens
        text = [
            f"{self.file}: {self.num_usable} of {self.num_rows} rows usable, content {self.content_hash}",
            f"prompt tokens: min {low}, median {median}, p99 {p99}, max {high}",
            "sources: " + ", ".join(f"{name} {n}" for name, n in self.by_source.items()),
            "abilities: " + ", ".join(f"{name or '(none)'} {n}" for name, n in self.by_ability.items()),
        ]
        text += [f"left out: {item}" for item in self.left_out[:max_listed]]
        if len(self.left_out) > max_listed:
            text.append(f"left out: {len(self.left_out) - max_listed} more")
        return text


def check_file(file: str, *, tokenizer_folder: str, max_prompt_tokens: int = 1 << 30) -> DataReport:
    """Reads a data file as a run would. Raises UserError when it cannot be read or holds no usable row."""
    prompts = load_prompts([file], tokenizer=PromptTokenizer(tokenizer_folder), max_prompt_tokens=max_prompt_tokens)
    lengths = sorted(len(prompt.token_ids) for prompt in prompts.prompts)
    return DataReport(
        file=file,
        num_rows=len(prompts) + len(prompts.left_out),
        num_usable=len(prompts),
        content_hash=prompts.content_hash,
        by_source=dict(Counter(prompt.data_source for prompt in prompts.prompts)),
        by_ability=dict(Counter(prompt.ability for prompt in prompts.prompts)),
        prompt_tokens=(lengths[0], lengths[len(lengths) // 2], lengths[int(0.99 * (len(lengths) - 1))], lengths[-1]),
        left_out=prompts.left_out,
    )
