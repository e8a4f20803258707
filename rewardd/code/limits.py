"""What one program may use."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

MIN_MEMORY_MB: Final = 64
_ADDRESS_SLACK_MB: Final = 1024
_ADDRESS_SLACK_ALONE_MB: Final = 192


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program, per test unless said otherwise.

    Attributes:
        time_limit_s: wall time of a test.
        cpu_s: CPU time of each of its processes; None: as `time_limit_s`, rounded up to whole seconds.
        total_s: wall time of all tests of the program together.
        memory_mb: memory of the test's process tree (exact with a cgroup; else per process).
        max_processes: processes and threads at one time.
        file_mb: size of any file and of the private /tmp.
        output_kb: standard output, and a function's encoded result.
    """

    time_limit_s: float = 6.0
    cpu_s: float | None = None
    total_s: float = 120.0
    memory_mb: int = 1024
    max_processes: int = 64
    file_mb: int = 64
    output_kb: int = 16 * 1024

    def __post_init__(self) -> None:
        for name in ("time_limit_s", "total_s", "memory_mb", "max_processes", "file_mb", "output_kb"):
            value = getattr(self, name)
            if not value > 0 or not math.isfinite(value):
                raise ValueError(f"limits.{name} is {value}; it has to be above 0")
        if self.memory_mb < MIN_MEMORY_MB:
            raise ValueError(f"limits.memory_mb is {self.memory_mb}; an interpreter alone needs {MIN_MEMORY_MB}")

    def with_time(self, time_limit_s: float) -> Limits:
        return replace(self, time_limit_s=time_limit_s)

    def for_process(self, *, has_cgroup: bool) -> dict[str, Any]:
        """The limits in the fork server's terms.

        The address space of a process may exceed the memory limit where a cgroup counts real use: thread stacks and
        mapped libraries are reserved, not used.
        """
        cpu = self.time_limit_s if self.cpu_s is None else self.cpu_s
        slack = _ADDRESS_SLACK_MB if has_cgroup else _ADDRESS_SLACK_ALONE_MB
        return {
            "cpu_s": max(1, math.ceil(cpu)),
            "address_mb": self.memory_mb + slack,
            "max_processes": self.max_processes,
            "file_mb": self.file_mb,
        }
