"""Folders of checkpoints. A checkpoint is written aside, made durable, committed by one rename, and pruned after.

    write into   .tmp-step_00000012-<pid>/     files, fsync, then the COMMITTED manifest, fsync
    commit       rename to step_00000012/, fsync the parent
    prune        committed ones beyond `keep` and left-overs of dead writers, oldest first

So a folder named step_* with a manifest whose sizes and checksums hold is complete, at every instant at least one such
folder exists once the first was committed, and the newest is never removed.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from learner.checkpoint.manifest import MANIFEST, Manifest, fsync_path, hash_file, read_manifest
from protocol.errors import ExitStatus, UserError

log = logging.getLogger(__name__)

TENSORS = "state.safetensors"
TEMPORARY = ".tmp-"
ABANDONED = ".abandoned-"
STEP_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class CheckpointState:
    """All of a learner's state at a batch boundary: tensors on the host by name, and plain JSON values."""

    step: int
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass(frozen=True)
class Found:
    """The newest complete checkpoint (None: none) and what was passed over, as ``name: reason`` lines."""

    path: Path | None
    manifest: Manifest | None
    skipped: tuple[str, ...] = ()


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def committed_steps(root: Path) -> list[int]:
    """Steps with a manifest in place, ascending; checksums are not read."""
    if not root.is_dir():
        return []
    names = (STEP_NAME.fullmatch(entry.name) for entry in root.iterdir() if (entry / MANIFEST).is_file())
    return sorted(int(match.group(1)) for match in names if match)


def newest_committed(root: Path) -> Found:
    """The newest checkpoint that is whole, after checking every byte of it; says which newer ones are not, and why."""
    skipped: list[str] = []
    if not root.is_dir():
        return Found(path=None, manifest=None)
    steps = sorted((int(m.group(1)), e) for e in root.iterdir() if (m := STEP_NAME.fullmatch(e.name)) and e.is_dir())
    for _, folder in reversed(steps):
        try:
            return Found(path=folder, manifest=read_manifest(folder), skipped=tuple(skipped))
        except (ValueError, OSError) as error:
            skipped.append(f"{folder.name}: {error}")
    return Found(path=None, manifest=None, skipped=tuple(skipped))


def write_checkpoint(
    root: Path, state: CheckpointState, *, keep: int, min_free_bytes: int = 0, protected_step: int = -1
) -> Path:
    """Writes and commits a checkpoint, then prunes; returns its folder. Blocks until everything is on the disk.

    A step that is committed already is kept as it is: within a lineage it is the same state.

    Raises UserError when there is not room for it (before anything is written) or writing fails; committed
    checkpoints are untouched then.
    """
    target = step_folder(root, state.step)
    temporary = root / f"{TEMPORARY}{target.name}-{os.getpid()}"
    if target.is_dir() and _is_complete(target):
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(root)
        _require_room(root, needed=state.num_bytes, min_free_bytes=min_free_bytes)
        temporary.mkdir()
        save_file(state.tensors, temporary / TENSORS)
        fsync_path(temporary / TENSORS)
        manifest = Manifest(step=state.step, scalars=state.scalars, files={TENSORS: hash_file(temporary / TENSORS)})
        (temporary / MANIFEST).write_text(manifest.to_json())
        fsync_path(temporary / MANIFEST)
        fsync_path(temporary)
        _replace(temporary, target)
        fsync_path(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _write_error(root, state.step, error) from error
    prune(root, keep=keep, protected_step=protected_step)
    return target


def _write_error(root: Path, step: int, error: Exception) -> UserError:
    steps = committed_steps(root)
    last = f"step {steps[-1]} is the last good one" if steps else "there is no earlier one"
    return UserError(
        f"checkpoint of step {step} could not be written to {root}: {error}; {last}. Free space or fix permissions.",
        status=ExitStatus.DISK_FULL,
    )


def _require_room(root: Path, *, needed: int, min_free_bytes: int) -> None:
    free = shutil.disk_usage(root).free
    if free < needed + min_free_bytes:
        raise OSError(
            f"{free / 1e9:.2f} GB free, needs {needed / 1e9:.2f} GB and {min_free_bytes / 1e9:.2f} GB "
            "to spare (learner.checkpoint.min_free_gb)"
        )


def has_room(root: Path, *, needed: int, min_free_bytes: int) -> bool:
    """Whether a checkpoint of this size could be begun now."""
    return root.is_dir() and shutil.disk_usage(root).free >= needed + min_free_bytes


def _is_complete(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except (ValueError, OSError):
        return False
    return True


def _replace(temporary: Path, target: Path) -> None:
    """Renames into place; a damaged folder of that name makes way first."""
    if target.exists():
        _remove(target)
    temporary.rename(target)


def prune(root: Path, *, keep: int, protected_step: int = -1) -> None:
    """Removes committed checkpoints but the newest ``keep`` (at least one) and the newest up to ``protected_step``."""
    steps = committed_steps(root)
    protected = max((step for step in steps if step <= protected_step), default=None)
    for step in steps[: -max(1, keep)]:
        if step != protected:
            _remove(step_folder(root, step))


def _remove(folder: Path) -> None:
    doomed = folder.with_name(f"{TEMPORARY}pruned-{folder.name}-{os.getpid()}")
    try:
        folder.rename(doomed)  # in one step, so that a half-deleted folder is never taken for a checkpoint
        shutil.rmtree(doomed)
    except OSError as error:
        log.warning("old checkpoint %s could not be removed: %s", folder.name, error)


def remove_leftovers(root: Path) -> list[str]:
    """Removes temporary folders of writers that are gone; returns their names."""
    removed = []
    for entry in root.glob(f"{TEMPORARY}*"):
        owner = entry.name.rpartition("-")[2]
        if owner.isdigit() and int(owner) != os.getpid() and Path(f"/proc/{owner}").exists():
            continue
        shutil.rmtree(entry, ignore_errors=True)
        removed.append(entry.name)
    return removed


def abandon_after(root: Path, *, step: int) -> list[str]:
    """Sets aside checkpoints of later steps (the operator resumes from ``step``); returns the new names."""
    moved = []
    for later in [s for s in committed_steps(root) if s > step]:
        folder = step_folder(root, later)
        number = 0
        while (aside := root / f"{ABANDONED}{number}-{folder.name}").exists():
            number += 1
        folder.rename(aside)
        moved.append(aside.name)
    return moved


def open_tensors(folder: Path) -> Callable[[str], torch.Tensor]:
    """A reader of single tensors of a checkpoint, memory-mapped. Raises KeyError for a name it does not hold."""
    file = safe_open(str(folder / TENSORS), framework="pt")
    names = set(file.keys())

    def read(name: str) -> torch.Tensor:
        if name not in names:
            raise KeyError(f"checkpoint {folder} does not hold {name}")
        return file.get_tensor(name)

    return read
