"""The receiving side of the notify protocol: which child said what, by the kernel's word for its pid."""

import array
import contextlib
import os
import shutil
import socket
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")
_MAX_DATAGRAM = 8192


class NoticeSocket:
    """A datagram socket in a private folder; `address` goes to children as NOTIFY_SOCKET."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="slipstream-notify-"))
        self.address = str(self._folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(self.address)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def read(self) -> list[tuple[int, dict[str, str]]]:
        """(pid of the sender, its assignments) of every datagram that has arrived."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                data, ancillary, _, _ = self._socket.recvmsg(
                    _MAX_DATAGRAM, socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(array.array("i").itemsize)
                )
                pid = _sender(ancillary)
                if pid:
                    lines = data.decode(errors="replace").splitlines()
                    found.append((pid, dict(line.split("=", 1) for line in lines if "=" in line)))
        return found

    def close(self) -> None:
        """Close the socket and remove its folder."""
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return int(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0])
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            for fd in array.array("i", data[: len(data) // 4 * 4]):
                os.close(fd)
    return 0


@dataclass
class Pulse:
    """What one process has said: pure, fed with its notices; the watch begins with READY, as systemd's does.

    Attributes:
        watchdog_s: longest silence allowed; 0 = any.
        stop_s: longest time from STOPPING to the exit.
        may_dump: it has not been asked for its stack yet.
    """

    watchdog_s: float
    stop_s: float
    is_ready: bool = False
    is_stopping: bool = False
    status: str = ""
    fed_at: float = 0.0
    num_feeds: int = 0
    may_dump: bool = True

    def note(self, fields: dict[str, str], now: float) -> None:
        """Take in one datagram."""
        interval = fields.get("WATCHDOG_USEC", "")
        if interval.isdigit():
            self.watchdog_s = int(interval) / 1e6
        self.is_ready |= fields.get("READY") == "1"
        self.status = fields.get("STATUS", self.status)
        if "READY" in fields or "WATCHDOG" in fields or interval:
            self.fed_at = now
            self.num_feeds += 1
        if fields.get("STOPPING") == "1" and not self.is_stopping:
            self.is_stopping, self.fed_at = True, now

    def silent_s(self, now: float) -> float:
        """Seconds beyond the allowed silence; 0 or less: all is well."""
        if self.is_stopping:
            return now - self.fed_at - self.stop_s
        if not self.is_ready or not self.watchdog_s:
            return 0.0
        return now - self.fed_at - self.watchdog_s
