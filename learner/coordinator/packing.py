"""The micro-batches of a plan, balanced by the model's FLOPs."""

from learner.packing import ModelShape, PackingPlan, pack


def plan_micro_batches(lengths: list[int], *, max_tokens: int, num_ranks: int, shape: ModelShape | None) -> PackingPlan:
    """Packs sequences of these lengths (tokens). Raises ValueError when one is longer than `max_tokens`."""
    return pack(lengths, max_tokens=max_tokens, num_ranks=num_ranks, flops=shape or float)
