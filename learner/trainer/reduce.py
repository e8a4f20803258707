"""Numbers that all ranks must agree on, in one collective each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def sum_over_ranks(
    values: Mapping[str, float | torch.Tensor], *, device: torch.device, group: Any = None
) -> dict[str, float]:
    """Sums named numbers over the ranks of a group (None: all) in float64; all must give the same names."""
    names = sorted(values)
    total = torch.tensor([float(values[name]) for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    return dict(zip(names, total.tolist(), strict=True))


def max_over_ranks(value: float, *, device: torch.device) -> float:
    """Largest of the ranks' values."""
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def raise_together(error: Exception | None, *, device: torch.device) -> None:
    """Raises on every rank when any has an error, so that none is left waiting in a collective.

    The rank with the error raises its own; the others a ValueError that says where to look.
    """
    num_errors = sum_over_ranks({"errors": float(error is not None)}, device=device)["errors"]
    if error is not None:
        raise error
    if num_errors:
        raise ValueError(f"{int(num_errors)} other trainer rank(s) refused the batch: see their logs")
