"""Liveness by progress: no new token for too long, with work pending, means the engine is stuck. Pure."""

from collections.abc import Mapping


class Watchdog:
    """Fed with token counts; being idle without work is healthy.

    Args:
        no_token_s: longest time without a new token while requests run.
    """

    def __init__(self, no_token_s: float, *, now: float) -> None:
        self._no_token_s = no_token_s
        self._last_progress = now
        self._seen: dict[str, int] = {}

    @property
    def last_progress(self) -> float:
        """When work was last done (or there was none to do), on the caller's clock."""
        return self._last_progress

    def observe(self, progress: Mapping[str, int], *, now: float) -> str:
        """Returns "" when healthy, else what is wrong. `progress` maps running requests to their token counts."""
        moved = any(count > self._seen.get(request, 0) for request, count in progress.items())
        ended = any(request not in progress for request in self._seen)
        if moved or ended or not progress:
            self._last_progress = now
        self._seen = dict(progress)
        stuck_s = now - self._last_progress
        if stuck_s <= self._no_token_s:
            return ""
        return f"no token for {stuck_s:.0f} s with {len(progress)} requests running (generators.no_token_s)"
