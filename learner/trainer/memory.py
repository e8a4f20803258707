"""Resident memory of this process."""

from __future__ import annotations

import psutil


def resident_bytes() -> int:
    """Resident set size in bytes."""
    return int(psutil.Process().memory_info().rss)
