"""The FLOPs formula that packing balances by and that MFU is declared with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ModelShape:
    """What the FLOPs of a dense decoder-only transformer depend on.

    ``num_matmul_params`` counts the weights that multiply every token (all of the layers' matrices and the output
    head once; not the input embedding, which is a look-up).
    """

    num_layers: int
    num_heads: int
    head_dim: int
    num_matmul_params: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "head_dim", "num_matmul_params"):
            if getattr(self, name) <= 0:
                raise ValueError(f"ModelShape.{name} must be positive, got {getattr(self, name)}")

    @classmethod
    def from_dimensions(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
    ) -> ModelShape:
        """Shape of a Llama- or Qwen-like model (gated MLP, grouped-query attention) from its configuration."""
        attention = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
        mlp = 3 * hidden_size * intermediate_size
        params = num_layers * (attention + mlp) + hidden_size * vocab_size
        return cls(num_layers=num_layers, num_heads=num_heads, head_dim=head_dim, num_matmul_params=params)


def model_shape(model_folder: str | Path) -> ModelShape | None:
    """Shape of the model from its config.json; None when the file does not say.

    Of a mixture of experts only the experts that a token passes through count.
    """
    path = Path(model_folder) / "config.json"
    if not path.is_file():
        return None
    facts = json.loads(path.read_text())
    try:
        heads = facts["num_attention_heads"]
        width = facts["intermediate_size"]
        if facts.get("num_experts_per_tok"):
            width = facts["num_experts_per_tok"] * facts["moe_intermediate_size"]
        return ModelShape.from_dimensions(
            num_layers=facts["num_hidden_layers"],
            hidden_size=facts["hidden_size"],
            intermediate_size=width,
            num_heads=heads,
            num_kv_heads=facts.get("num_key_value_heads") or heads,
            head_dim=facts.get("head_dim") or facts["hidden_size"] // heads,
            vocab_size=facts["vocab_size"],
        )
    except KeyError:
        return None


def forward_flops(lengths: Sequence[int] | NDArray[np.int64], *, shape: ModelShape) -> NDArray[np.float64]:
    """FLOPs of one forward pass over each sequence, ``2 N s + 2 s^2 L H d`` (causal: half of ``4 s^2 L H d``).

    ``N`` matmul parameters, ``s`` tokens of the sequence, ``L`` layers, ``H`` heads of size ``d``. Shape ``[S]``.
    """
    s = np.asarray(lengths, dtype=np.float64)
    width = shape.num_layers * shape.num_heads * shape.head_dim
    return 2.0 * shape.num_matmul_params * s + 2.0 * width * s * s


def training_flops(lengths: Sequence[int] | NDArray[np.int64], *, shape: ModelShape) -> NDArray[np.float64]:
    """FLOPs of forward and backward, three times the forward: ``6 N s + 6 s^2 L H d``. Recomputation is not counted."""
    return 3.0 * forward_flops(lengths, shape=shape)
