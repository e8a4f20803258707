"""Which rows can be trained on: prompts of a usable form, reference answers their verifier can use, no overlap."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from learner.data.tokenization import Message

_SPACES = re.compile(r"\s+")
GoldCheck = Callable[[str], str | None]


def plain(value: Any) -> Any:
    """Arrays and tuples as lists, None keys of unified struct columns dropped: a value that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items() if v is not None}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def messages_of(prompt: Any) -> list[Message] | str:
    """The prompt as chat messages, or the reason why it is none."""
    prompt = plain(prompt)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        return "the prompt is empty"
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
            return "a message of the prompt lacks role or content"
    if not any(message["content"].strip() for message in prompt if message["role"] == "user"):
        return "the prompt is empty"
    return [{"role": str(m["role"]), "content": m["content"]} for m in prompt]


def check_reward_model(reward_model: Any, *, ability: str, math_gold: GoldCheck) -> str | None:
    """None when the reference answer can be used, else the reason (B81)."""
    if not isinstance(reward_model, Mapping):
        return "reward_model is missing"
    gold = reward_model.get("ground_truth")
    if gold is None:
        return "ground_truth is missing"
    if isinstance(gold, str) and not gold.strip():
        return "ground_truth is empty"
    decoded = decode_gold(gold)
    if decoded in ([], {}):
        return "ground_truth is empty"
    if ability == "code":
        return _check_code_gold(decoded)
    if ability == "math" or (not ability and isinstance(decoded, str | int | float)):
        candidates = decoded if isinstance(decoded, list) else [decoded]
        if any(isinstance(c, dict) for c in candidates):
            return "ground_truth of a math prompt must be an answer or a list of answers"
        reasons = [math_gold(str(candidate)) for candidate in candidates]
        if all(reason is not None for reason in reasons):
            return f"ground_truth cannot be parsed: {reasons[0]}"
    return None


def decode_gold(gold: Any) -> Any:
    """JSON strings that hold a list or an object are decoded; everything else stays as it is ("025" is text)."""
    if isinstance(gold, str) and gold.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(gold)
        except ValueError:
            return gold
        return value if isinstance(value, list | dict) else gold
    return plain(gold)


def _check_code_gold(decoded: Any) -> str | None:
    if not isinstance(decoded, list | dict):
        return "ground_truth of a code prompt must be a JSON list or object of tests"
    return None


def default_math_gold() -> GoldCheck:
    """The math verifier's own check of reference answers, or a weaker one where the verifier is not installed."""
    try:
        from rewardd.math import check_gold
    except ImportError:
        return lambda gold: None if gold.strip() else "it is empty"
    return check_gold


def overlap_key(messages: Iterable[Message]) -> str:
    """What two prompts are compared by: user text without case and with single spaces (B82)."""
    text = " ".join(m["content"] for m in messages if m["role"] == "user")
    return _SPACES.sub(" ", text).strip().casefold()
