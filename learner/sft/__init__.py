"""Supervised warm start with the learner's engine, packing, sequence parallelism and checkpoints."""
