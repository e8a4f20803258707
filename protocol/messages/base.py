"""What all messages share: names of roles and outcomes, the base of bodies, sampling parameters, addresses."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

PROTOCOL_VERSION = 1

Role = Literal["coordinator", "trainer", "rewardd", "generator", "client"]
Purpose = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "interrupted", "aborted"]
VerdictKind = Literal["correct", "partial", "wrong", "unjudged", "rejected"]
NonNegative = Annotated[int, Meta(ge=0)]


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))


class Body(Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="type", tag=_snake):
    """Base of all message bodies."""


class SamplingParams(Struct, kw_only=True, frozen=True):
    """Every sampling parameter, set explicitly and recorded with the trajectory (design.md, invariant 1).

    Units: `max_tokens` and `min_tokens` in tokens; `top_k` = -1 and `top_p` = 1.0 and `min_p` = 0.0 mean off.
    `logprobs` names the convention of the recorded behaviour log-probs: "processed" is log-softmax(logits / T).
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    logprobs: Literal["processed"] = "processed"


class RewarddAddress(Struct, kw_only=True, frozen=True):
    """A live reward daemon."""

    name: str
    address: str
