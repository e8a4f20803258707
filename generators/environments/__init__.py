"""Multi-turn answers: a user's environment alternates with the policy's turns within one answer."""

from generators.environments.base import Environment, Episode, Observation, Turn, load_environment

__all__ = ["Environment", "Episode", "Observation", "Turn", "load_environment"]
