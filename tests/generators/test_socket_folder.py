"""Where the engine's sockets lie: a folder of the generator's own, short enough, emptied at each start."""

import os
import socket
from pathlib import Path

from generators.vllm_adapter import socket_folder


def test_sockets_that_a_killed_engine_left_are_removed_and_nothing_else(tmp_path: Path) -> None:
    run_dir = tmp_path / ("long" * 20)
    folder = socket_folder(run_dir, "generator-0")
    other = socket_folder(run_dir, "generator-1")
    for place in (folder, other):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(place / ("0" * 36)))  # the length of the engine's names: the path must be short enough
    (folder / "kept").write_text("")
    assert socket_folder(run_dir, "generator-0") == folder
    assert [path.name for path in folder.iterdir()] == ["kept"]
    assert [path.name for path in other.iterdir()] == ["0" * 36]
    for place in (folder, other):
        for path in place.iterdir():
            path.unlink()
        place.rmdir()


def test_a_short_run_folder_holds_them_itself(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = socket_folder(Path("run"), "generator-0")
    assert folder == Path("run/state/generator-0") and os.stat(folder).st_mode & 0o077 == 0
