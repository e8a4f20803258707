"""Trainer ranks: DeepSpeed ZeRO-3 engine, update loop, publishing, checkpoints."""
