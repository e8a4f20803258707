"""What a role tells the service manager that started it, by systemd's notify protocol (sd_notify(3)).

systemd and the local supervisor read the same datagrams. Keep-alives are sent by the work itself, never by a timer: a
role whose loop is stuck falls silent. An operation that may rightly take longer says so beforehand and gets its time.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, MutableMapping
from functools import cache

from protocol.logs import event

log = logging.getLogger(__name__)

FEEDS_PER_INTERVAL = 8
SEND_S = 1.0
"""The kernel queues only some ten datagrams; a busy service manager is waited for this long."""


class Notifier:
    """Speaks to NOTIFY_SOCKET; without one every call does nothing.

    The variables are taken out of `environment`, so that no child speaks in this process's name. Not thread-safe:
    only the role's own loop may call it.
    """

    def __init__(self, environment: MutableMapping[str, str], *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._address = _address(environment.pop("NOTIFY_SOCKET", ""))
        interval_us, owner = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        is_ours = not owner or owner == str(os.getpid())
        self._interval_s = int(interval_us) / 1e6 if interval_us.isdigit() and is_ours else 0.0
        self._fed_at = -float("inf")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if self._address else None
        if self._socket is not None:
            self._socket.settimeout(SEND_S)

    @property
    def watchdog_s(self) -> float:
        """Longest silence that the service manager allows; 0 without a watchdog."""
        return self._interval_s

    def ready(self, status: str) -> None:
        """Start-up is over: the role does its work from here on."""
        self._send("READY=1", "WATCHDOG=1", f"STATUS={status}")

    def progress(self) -> None:
        """A piece of work was done, or there is rightly none. Cheap: most calls send nothing."""
        if not self._interval_s or self._now() - self._fed_at < self._interval_s / FEEDS_PER_INTERVAL:
            return
        self._fed_at = self._now()
        self._send("WATCHDOG=1")

    def stopping(self, status: str) -> None:
        """An orderly stop has begun."""
        self._send("STOPPING=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        """One line for people (`systemctl status`)."""
        self._send(f"STATUS={status}")

    @contextlib.contextmanager
    def long_operation(self, what: str, *, deadline_s: float) -> Iterator[None]:
        """Announces work that may take up to `deadline_s` without a sign of progress."""
        if not self._interval_s or deadline_s <= self._interval_s:
            yield
            return
        usual_s = self._interval_s
        self.allow_silence(deadline_s, status=what)
        try:
            yield
        finally:
            self.allow_silence(usual_s)

    def allow_silence(self, seconds: float, *, status: str = "") -> None:
        """Changes the longest silence from now on (systemd: WATCHDOG_USEC). Does nothing without a watchdog."""
        if self._interval_s:
            self._interval_s, self._fed_at = seconds, self._now()
            lines = [f"WATCHDOG_USEC={seconds * 1e6:.0f}", "WATCHDOG=1"]
            self._send(*lines, *([f"STATUS={status}"] if status else []))

    def _send(self, *lines: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(line.replace("\n", " ") for line in lines).encode(), self._address)
        except OSError as error:
            event(log, logging.WARNING, "service manager not told", error=str(error), what=lines[0])


def _address(value: str) -> str:
    return "\0" + value[1:] if value.startswith("@") else value


@cache
def notifier() -> Notifier:
    """The notifier of this process."""
    return Notifier(os.environ)
