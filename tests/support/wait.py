"""Waiting for a condition with a deadline."""

import threading
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, deadline_s: float = 20.0, what: str = "condition") -> None:
    """Check `condition` every 10 ms until it holds; fail after the deadline."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true within {deadline_s} s"
        pause.wait(0.01)
