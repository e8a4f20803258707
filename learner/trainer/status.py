"""What the trainer says of itself in heartbeats: state, what it waits for, where its time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from learner.trainer.batch import UpdateResult
from learner.trainer.memory import resident_bytes
from protocol.endpoint import MetricsEndpoint
from protocol.idle import IdleClock
from protocol.messages import Heartbeat
from protocol.notify import notifier

REPORTED = ("perf/update_seconds", "perf/learner_tokens_per_second", "actor/grad_norm", "learner/skipped_steps")


class TrainerStatus:
    """Written by the trainer's loop, read by the heartbeat thread.

    Args:
        longest_s: what a piece of work may take without a sign of progress before the service manager steps in.
        endpoint: shows Prometheus each update's metrics.
    """

    def __init__(self, *, longest_s: float = 600.0, endpoint: MetricsEndpoint | None = None) -> None:
        self._longest_s = longest_s
        self._endpoint = endpoint
        self._clock = IdleClock()
        self._state = "starting"
        self._waiting_for = ""
        self._policy_version = 0
        self._progress_at = time.monotonic()
        self._metrics: dict[str, float] = {}

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Books the block as idle, waiting for `what`."""
        self._state, self._waiting_for = "waiting", what
        try:
            with self._clock.cause(f"waiting for {what}"):
                yield
        finally:
            self._waiting_for = ""

    @contextmanager
    def working(self, state: str) -> Iterator[None]:
        """Books the block as work; publishing and saving are booked apart from training."""
        self._state = state
        with (
            self._clock.cause("working" if state == "training" else state),
            notifier().long_operation(state, deadline_s=self._longest_s),
        ):
            yield

    def started(self, policy_version: int) -> None:
        """The engine is up with this version."""
        self._policy_version = policy_version
        self._progress_at = time.monotonic()

    def progressed(self, result: UpdateResult) -> None:
        """A batch was trained."""
        self._policy_version = result.policy_version
        self._progress_at = time.monotonic()
        if self._endpoint is not None:
            self._endpoint.values = result.metrics
        self._metrics = {name: result.metrics[name] for name in REPORTED if name in result.metrics}

    def heartbeat(self) -> Heartbeat:
        """The heartbeat of this moment."""
        return Heartbeat(
            state=self._state,
            waiting_for=self._waiting_for,
            policy_version=self._policy_version,
            progress_age_s=time.monotonic() - self._progress_at,
            idle_fractions=self._clock.fractions(),
            metrics=self._metrics | {"resident_mb": resident_bytes() / 1e6},
        )
