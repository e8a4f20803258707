"""Configuration of a run: strict pydantic models, loading, overrides, cross-role checks."""

from protocol.config.tree import Config

__all__ = ["Config"]
