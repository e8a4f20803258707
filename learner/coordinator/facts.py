"""Facts of the run that survive restarts: identity, versions, last batch, attempt, state."""

import secrets
from typing import Literal

from learner.coordinator.store import Store

RunState = Literal["running", "evaluating", "finished", "stopped"]


class RunFacts:
    """Typed view of the store's facts. Every change is part of the store's current transaction.

    `policy_version` is the version after the newest trained batch, `published_version` the newest that a generator
    serves, `last_batch` the newest trained batch of the surviving lineage, `attempt` counts trainer starts.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        if store.get("run_id") is None:
            store.put("run_id", secrets.token_hex(8))

    @property
    def run_id(self) -> str:
        return str(self._store.get("run_id"))

    @property
    def policy_version(self) -> int:
        return int(self._store.get("policy_version", 0))

    @policy_version.setter
    def policy_version(self, value: int) -> None:
        self._store.put("policy_version", value)

    @property
    def published_version(self) -> int:
        return int(self._store.get("published_version", 0))

    @published_version.setter
    def published_version(self, value: int) -> None:
        self._store.put("published_version", value)

    @property
    def last_batch(self) -> int:
        return int(self._store.get("last_batch", 0))

    @last_batch.setter
    def last_batch(self, value: int) -> None:
        self._store.put("last_batch", value)

    @property
    def attempt(self) -> int:
        return int(self._store.get("attempt", 0))

    @attempt.setter
    def attempt(self, value: int) -> None:
        self._store.put("attempt", value)

    @property
    def state(self) -> RunState:
        state: RunState = self._store.get("run_state", "running")
        return state

    @state.setter
    def state(self, value: RunState) -> None:
        self._store.put("run_state", value)

    @property
    def paused(self) -> str:
        """Why leasing and training are paused; "" when they are not."""
        return str(self._store.get("paused", ""))

    @paused.setter
    def paused(self, reason: str) -> None:
        self._store.put("paused", reason)
