"""The micro-batches of a plan, balanced by the model's FLOPs."""

import json
from pathlib import Path

from learner.packing import ModelShape, PackingPlan, pack


def model_shape(model_folder: str | Path) -> ModelShape | None:
    """Shape of the model from its config.json; None when the file does not say (lengths are balanced then)."""
    path = Path(model_folder) / "config.json"
    if not path.is_file():
        return None
    facts = json.loads(path.read_text())
    try:
        heads = facts["num_attention_heads"]
        return ModelShape.from_dimensions(
            num_layers=facts["num_hidden_layers"],
            hidden_size=facts["hidden_size"],
            intermediate_size=facts["intermediate_size"],
            num_heads=heads,
            num_kv_heads=facts.get("num_key_value_heads") or heads,
            head_dim=facts.get("head_dim") or facts["hidden_size"] // heads,
            vocab_size=facts["vocab_size"],
        )
    except KeyError:
        return None


def plan_micro_batches(lengths: list[int], *, max_tokens: int, num_ranks: int, shape: ModelShape | None) -> PackingPlan:
    """Packs sequences of these lengths (tokens). Raises ValueError when one is longer than `max_tokens`."""
    return pack(lengths, max_tokens=max_tokens, num_ranks=num_ranks, flops=shape or float)
