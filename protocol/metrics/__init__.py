"""Every metric that any role emits: its name, unit, meaning, normal range, and what to do outside of it."""

from protocol.metrics.registry import Family, Metric, all_metrics, families, find, placed, unregistered

__all__ = ["Family", "Metric", "all_metrics", "families", "find", "placed", "unregistered"]
