"""Which scorer judges a prompt's answers: by configuration, else by ability and by the shape of the ground truth.

Data sources are no guide: public data sets use dozens of names for the same two kinds (Skywork-OR1 has ten).
"""

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Raw, Struct

from protocol.messages import GroundTruth
from rewardd.scorers import encode_truth

TEST_KEYS = frozenset(
    ("inputs", "outputs", "assert_case", "test_code", "import_prefix", "public_test_cases", "private_test_cases")
)

PLAIN_SCORERS = frozenset(("math", "code", "passthrough"))


class Routed(Struct, frozen=True, kw_only=True):
    """A ground truth ready for its scorer; `problem` says why it has none."""

    scorer: str
    truth: Raw
    extra: dict[str, Any]
    problem: str = ""
    num_bytes: int = 0


def decode_ground_truth(value: Any) -> Any:
    """JSON text of a list of texts or a mapping is decoded; any other text stays as it is ("025" is text, not a number,
    and "[0,2]" an interval). None entries of a mapping are dropped (columnar files add them)."""
    if isinstance(value, str):
        try:
            decoded = json.loads(value)
        except ValueError:
            return value
        if isinstance(decoded, dict) or (
            isinstance(decoded, list) and all(isinstance(item, str | None) for item in decoded)
        ):
            value = decoded
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}
    return value


def is_test_set(truth: Any, *, ability: str) -> bool:
    """Whether a decoded ground truth holds tests of a program."""
    if isinstance(truth, dict):
        return not TEST_KEYS.isdisjoint(truth)
    return ability.startswith("code") and isinstance(truth, list)


def route(item: GroundTruth, *, overrides: Mapping[str, str]) -> Routed:
    """Scorer and decoded truth of a prompt. `overrides` (rewardd.scorers) maps a data_source or ability to a name."""
    try:
        payload = json.loads(item.payload)
        truth = decode_ground_truth(payload["ground_truth"])
        extra = payload.get("extra_info") or {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return _unusable(f"payload of prompt {item.prompt_id}: {type(error).__name__} {error}")
    name = overrides.get(item.data_source) or overrides.get(item.ability)
    if name is None:
        if is_test_set(truth, ability=item.ability):
            name = "code"
        elif isinstance(truth, str | int | float | list) and truth not in ("", []) and not isinstance(truth, bool):
            name = "math"
        else:
            return _unusable(f"ground truth of prompt {item.prompt_id} is neither an answer nor a test set")
    if name in PLAIN_SCORERS:
        kept = {key: value for key, value in extra.items() if key in ("score", "program")} if extra else {}
    else:
        kept = {**extra, "prompt": payload.get("prompt")}
    return Routed(scorer=name, truth=encode_truth(truth), extra=kept, num_bytes=len(item.payload))


def _unusable(problem: str) -> Routed:
    return Routed(scorer="", truth=encode_truth(None), extra={}, problem=problem)
