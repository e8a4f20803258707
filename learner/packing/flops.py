"""The FLOPs formula that packing balances by and that MFU is declared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
