"""One control group per slot that counts the memory and processes of the program under test (v1 or v2)."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import time
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_NUMBERS: Final = itertools.count()
_REMOVE_DEADLINE_S: Final = 2.0
_REMOVE_PAUSE_S: Final = 0.005
_PREFIX: Final = "slipstream-code"


def _own_paths() -> dict[str, str]:
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}-*"):
        pid = folder.name.split("-")[2]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError as fault:
        return fault.errno != errno.EBUSY
    return True


class SlotGroup:
    """Groups of one slot; `try_create` gives None where control groups cannot be written."""

    def __init__(self, *, memory: Path, pids: Path, unified: bool) -> None:
        self._memory = memory
        self._pids = pids
        self._unified = unified
        self._limits: tuple[int, int] | None = None
        folders = [memory] if memory == pids else [memory, pids]
        self.fds = tuple(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in folders)

    @classmethod
    def try_create(cls) -> SlotGroup | None:
        try:
            own = _own_paths()
            if "memory" in own and "pids" in own:
                parents = [_ROOT / kind / own[kind].lstrip("/") for kind in ("memory", "pids")]
                return cls._create(parents[0], parents[1], unified=False)
            here = _ROOT / own[""].lstrip("/")
        except (OSError, KeyError, ValueError):
            return None
        for parent in (here, here.parent):
            with contextlib.suppress(OSError):
                if parent.is_relative_to(_ROOT):
                    return cls._create(parent, parent, unified=True)
        return None

    @classmethod
    def _create(cls, memory_parent: Path, pids_parent: Path, *, unified: bool) -> SlotGroup:
        folders = []
        name = f"{_PREFIX}-{os.getpid()}-{next(_NUMBERS)}"
        try:
            for parent in dict.fromkeys((memory_parent, pids_parent)):
                _remove_stale(parent)
                if unified:
                    (parent / "cgroup.subtree_control").write_text("+memory +pids")
                folder = parent / name
                folder.mkdir()
                folders.append(folder)
            group = cls(memory=folders[0], pids=folders[-1], unified=unified)
            group.limit(memory_mb=1024, max_processes=64)
            return group
        except OSError:
            for folder in folders:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise

    def limit(self, *, memory_mb: int, max_processes: int) -> None:
        """Sets the limits for the next test; nothing of an earlier one is in the group any more."""
        if self._limits == (memory_mb, max_processes):
            return
        memory = self._memory / ("memory.max" if self._unified else "memory.limit_in_bytes")
        swap = self._memory / ("memory.swap.max" if self._unified else "memory.memsw.limit_in_bytes")
        # Kernels without swap accounting lack the second file; v1 keeps it above the first at every moment.
        with contextlib.suppress(OSError):
            swap.write_text("0" if self._unified else "-1")
        memory.write_text(str(memory_mb << 20))
        with contextlib.suppress(OSError):
            swap.write_text("0" if self._unified else str(memory_mb << 20))
        (self._pids / "pids.max").write_text(str(max_processes + 1))
        self._limits = (memory_mb, max_processes)

    def num_oom_kills(self) -> int:
        """How many processes the memory limit has killed since the group was made."""
        file = self._memory / ("memory.events" if self._unified else "memory.oom_control")
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    def close(self) -> None:
        for handle in self.fds:
            os.close(handle)
        self.fds = ()
        # The last processes of a server that was killed may still be on their way out.
        deadline = time.monotonic() + _REMOVE_DEADLINE_S
        for folder in dict.fromkeys((self._memory, self._pids)):
            while not _remove(folder) and time.monotonic() < deadline:
                select.select([], [], [], _REMOVE_PAUSE_S)
