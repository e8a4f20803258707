"""The stop signal of a role: SIGTERM or SIGINT once is orderly, twice is at once."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType

from protocol.errors import ExitStatus


class StopSignal:
    """`requested` turns True with the first signal after `install`; the second ends the process at once.

    Waiting goes through an eventfd: locks are not safe in a signal handler.
    """

    def __init__(self) -> None:
        self.requested = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def install(self) -> None:
        """Takes over SIGTERM and SIGINT (main thread only)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def request(self) -> None:
        """What the first signal does."""
        self.requested = True
        os.eventfd_write(self._event, 1)

    def wait(self, timeout_s: float) -> bool:
        """Waits for the stop, at most this long; returns whether it was requested."""
        select.select([self._event], [], [], timeout_s)
        return self.requested

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(ExitStatus.STOPPED)
        self.request()
