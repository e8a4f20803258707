"""Asking the coordinator what everything is doing, and showing it."""
