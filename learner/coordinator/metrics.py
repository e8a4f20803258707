"""Records that outlive the run: metrics.jsonl, one line per trained batch, and eval.jsonl, one per evaluation."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from protocol.errors import UserError


class RecordFile:
    """Appends JSON lines; each is flushed and synced before `append` returns. A torn last line is completed first.

    Args:
        on_record: given each record once it is safe; must neither wait nor raise.
    """

    def __init__(self, path: Path, *, on_record: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._path = path
        self._on_record = on_record
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; run.dir must be a writable folder") from error
        if self._file.tell() > 0:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def append(self, record: dict[str, Any]) -> None:
        """Writes one record durably."""
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        os.fdatasync(self._file.fileno())
        if self._on_record is not None:
            self._on_record(record)

    def records(self) -> Iterator[dict[str, Any]]:
        """All whole records."""
        with self._path.open("rb") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    continue

    def last(self) -> dict[str, Any]:
        """The newest whole record; empty when there is none."""
        return next(iter(deque(self.records(), maxlen=1)), {})

    def close(self) -> None:
        self._file.close()
