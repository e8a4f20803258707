"""Bounding the size of log files that other processes keep open for appending."""

import shutil
from pathlib import Path

KEPT = 3


def rotate_if_large(path: Path, *, max_bytes: int) -> bool:
    """Copy a log above `max_bytes` to PATH.1 (older ones move up, three are kept) and truncate it in place.

    Writers must have opened the file for appending. Lines written during the copy may be lost.
    """
    if not path.exists() or path.stat().st_size <= max_bytes:
        return False
    for index in range(KEPT - 1, 0, -1):
        older = path.with_name(f"{path.name}.{index}")
        if older.exists():
            older.replace(path.with_name(f"{path.name}.{index + 1}"))
    shutil.copyfile(path, path.with_name(f"{path.name}.1"))
    with path.open("r+b") as file:
        file.truncate(0)
    return True


def tail(path: Path, *, num_lines: int) -> list[str]:
    """The last lines of a log file (none when it does not exist)."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 512 * num_lines))
        return file.read().decode(errors="replace").splitlines()[-num_lines:]
