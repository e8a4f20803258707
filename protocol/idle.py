"""Where a role's time goes: every second is booked to exactly one cause ("working" when nothing else is named)."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

WORKING = "working"
LONGEST_SUM_S = 1.0


@dataclass(slots=True)
class _Span:
    """Seconds of each cause between two moments."""

    start: float
    end: float
    seconds: dict[str, float]


class IdleClock:
    """Books time to causes. One thread switches causes; any thread may read `fractions`.

    Example: ``with clock.cause("waiting for generation"): request.result(timeout=deadline)``. Causes nest: the inner
    one is booked until it ends. History older than `keep_s` seconds is forgotten; spans within one second are added
    up, so that a loop that switches hundreds of times a second costs no memory (shares near the edge of a window are
    then exact to a second).
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic, keep_s: float = 900.0) -> None:
        self._now = now
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._cause = WORKING
        self._since = now()
        self._spans: deque[_Span] = deque()  # oldest first
        self._totals: dict[str, float] = {}

    @property
    def current(self) -> str:
        """The cause that time is booked to now."""
        return self._cause

    @contextmanager
    def cause(self, name: str) -> Iterator[None]:
        """Books the time inside the block to `name`, then goes back to the cause before."""
        before = self._cause
        self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def switch(self, name: str) -> None:
        """Books time to `name` from now on."""
        with self._lock:
            if name != self._cause:
                self._close_span()
                self._cause = name

    def fractions(self, window_s: float = 60.0) -> dict[str, float]:
        """Share of each cause in the last `window_s` seconds (or since the start, if shorter). Sums to 1."""
        with self._lock:
            now = self._now()
            begin = now - window_s
            seconds: dict[str, float] = {self._cause: now - max(self._since, begin)}
            for span in reversed(self._spans):
                if span.end <= begin:
                    break
                share = (span.end - max(span.start, begin)) / (span.end - span.start)
                for cause, booked in span.seconds.items():
                    seconds[cause] = seconds.get(cause, 0.0) + share * booked
        total = sum(seconds.values())
        if total <= 0.0:
            return {self._cause: 1.0}
        return {cause: s / total for cause, s in seconds.items() if s > 0.0}

    def totals(self) -> dict[str, float]:
        """Seconds booked to each cause since the start."""
        with self._lock:
            totals = dict(self._totals)
            totals[self._cause] = totals.get(self._cause, 0.0) + self._now() - self._since
        return totals

    def _close_span(self) -> None:
        now = self._now()
        if now > self._since:
            self._totals[self._cause] = self._totals.get(self._cause, 0.0) + now - self._since
            last = self._spans[-1] if self._spans else None
            if last is None or now - last.start > LONGEST_SUM_S:
                self._spans.append(_Span(self._since, now, {self._cause: now - self._since}))
            else:
                last.end = now
                last.seconds[self._cause] = last.seconds.get(self._cause, 0.0) + now - self._since
            while self._spans[0].end < now - self._keep_s:
                self._spans.popleft()
        self._since = now
