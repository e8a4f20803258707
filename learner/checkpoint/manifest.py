"""The COMMITTED manifest: what a checkpoint holds, with sizes and checksums, and how completeness is checked."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "COMMITTED"
FORMAT = 1
CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: size in bytes and SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """``step`` is the id of the last batch the checkpoint contains; ``scalars`` is all state that is not a tensor."""

    step: int
    scalars: dict[str, Any]
    files: dict[str, FileEntry]

    def to_json(self) -> str:
        files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in self.files.items()}
        return json.dumps({"format": FORMAT, "step": self.step, "scalars": self.scalars, "files": files}, indent=1)


def hash_file(path: Path) -> FileEntry:
    """Size and checksum of a file, read in chunks."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(size=size, sha256=digest.hexdigest())


def read_manifest(folder: Path, *, verify: bool = True) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises ValueError with the reason when the folder is not one: no manifest, an unreadable one, a file that is
    missing, has another size or, with ``verify``, another checksum.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"no {MANIFEST} manifest (the save did not finish)")
    try:
        raw = json.loads(path.read_text())
        manifest = Manifest(
            step=int(raw["step"]),
            scalars=dict(raw["scalars"]),
            files={name: FileEntry(int(f["size"]), str(f["sha256"])) for name, f in raw["files"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"damaged {MANIFEST} manifest ({error})") from error
    if raw["format"] != FORMAT:
        raise ValueError(f"format {raw['format']}, this version reads {FORMAT}")
    for name, entry in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{name} is missing")
        if (size := file.stat().st_size) != entry.size:
            raise ValueError(f"{name} has {size} bytes, the manifest says {entry.size}")
        if verify and hash_file(file) != entry:
            raise ValueError(f"{name} does not match its checksum")
    return manifest


def fsync_path(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
