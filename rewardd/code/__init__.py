"""Sandboxed execution of model-written programs."""
