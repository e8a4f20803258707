"""Packing of sequences into micro-batches under a hard token cap, balanced over ranks. Needs numpy only."""

from learner.packing.flops import ModelShape, forward_flops, model_shape, training_flops
from learner.packing.planner import PackingPlan, pack

__all__ = ["ModelShape", "PackingPlan", "forward_flops", "model_shape", "pack", "training_flops"]
