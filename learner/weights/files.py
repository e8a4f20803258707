"""Transport "file": whole versions as safetensors folders on a path that trainer and generators share.

A folder is named by version and content, written beside its final place and renamed into it; a reader opens a whole
version or none. The two newest folders and any that is still being read are kept.
"""

import hashlib
import shutil
from pathlib import Path

from learner.weights.snapshot import Snapshot

_KEPT = 2


class VersionFiles:
    """The folder of published versions of one run."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._written: list[Path] = []

    def write(self, snapshot: Snapshot) -> Path:
        """Writes a version (once) and returns its folder; older ones beyond the newest two are removed."""
        from safetensors.torch import save_file

        content = hashlib.sha256(repr(snapshot.specs()).encode()).hexdigest()[:12]
        folder = self._root / f"version_{snapshot.policy_version:08d}_{content}"
        if folder not in self._written:
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save_file({name: tensor.cpu() for name, tensor in snapshot.tensors}, partial / "model.safetensors")
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            self._written.append(folder)
        self._prune()
        return folder

    def _prune(self) -> None:
        while len(self._written) > _KEPT:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)
