"""Crash-safe checkpoints: complete or absent, whatever happens while one is written."""
