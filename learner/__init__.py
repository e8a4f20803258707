"""The learner: coordinator, trainer, algorithms, packing, weights, checkpoints, evaluation."""
