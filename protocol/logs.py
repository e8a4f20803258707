"""Logging of every role: one structured line per event, repeats summarised with their count."""

import atexit
import json
import logging
import os
import sys
import time
from typing import Any, TextIO

WINDOW_S = 10.0
MAX_REPEATS = 5


def event(logger: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """Log one event; fields are appended as key=value."""
    logger.log(level, message, extra={"fields": fields}, stacklevel=2)


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z WARNING rewardd/rewardd-0 protocol.sockets.server: message key=value ...`

    For the journal, which stamps lines itself, each line begins with its priority (`<4>`, sd-daemon(3)) instead.
    """

    def __init__(self, role: str, name: str, *, for_journal: bool = False) -> None:
        super().__init__()
        self._who = f"{role}/{name}"
        self._for_journal = for_journal

    def format(self, record: logging.LogRecord) -> str:
        line = f"{record.levelname} {self._who} {record.name}: {record.getMessage()}"
        for key, value in getattr(record, "fields", {}).items():
            line += f" {key}={_plain(value)}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        if self._for_journal:
            priority = f"<{_priority(record.levelno)}>"
            return priority + line.replace("\n", f"\n{priority}")
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{stamp}.{int(record.msecs):03d}Z {line}"


def _priority(level: int) -> int:
    """The syslog priority of a logging level."""
    steps = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
    return next((priority for limit, priority in steps if level >= limit), 7)


def is_journal(stream: TextIO) -> bool:
    """Whether a stream goes straight to the systemd journal (JOURNAL_STREAM names its device and inode)."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text and not any(c in text for c in ' "=\n\t') else json.dumps(text, ensure_ascii=False)


class RepeatFilter(logging.Filter):
    """Lets the first 5 records of one kind (logger, level, message template) through in 10 s and counts the rest.

    The count is printed with the first record of any kind after the window, and at exit. CRITICAL is never held.
    """

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler
        self._windows: dict[tuple[str, int, str], list[float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        self.summarise(before=now - WINDOW_S)
        if record.levelno >= logging.CRITICAL:
            return True
        key = (record.name, record.levelno, str(record.msg))
        window = self._windows.setdefault(key, [now, 0])
        window[1] += 1
        return window[1] <= MAX_REPEATS

    def summarise(self, *, before: float | None = None) -> None:
        """Close windows that began before `before` (None: all) and say how many records each one held back."""
        for key, (start, seen) in list(self._windows.items()):
            if before is not None and start > before:
                continue
            del self._windows[key]
            if seen > MAX_REPEATS:
                name, level, message = key
                record = logging.LogRecord(name, level, "", 0, f"{message} (repeated)", None, None)
                record.fields = {"held_back": int(seen) - MAX_REPEATS}
                self._handler.emit(record)


def setup_logging(role: str, name: str, *, level: int = logging.INFO, stream: TextIO | None = None) -> logging.Handler:
    """Send all logging of this process to `stream` (default: standard error) as structured lines."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(role, name, for_journal=is_journal(handler.stream)))
    repeats = RepeatFilter(handler)
    handler.addFilter(repeats)
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old.formatter, LineFormatter):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    atexit.register(repeats.summarise)
    return handler
