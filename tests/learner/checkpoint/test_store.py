"""Checkpoint folders: complete or absent under kills, full disks, damage and pruning."""

import json
import os
import random
import resource
import signal
import time
from itertools import count

import numpy as np
import pytest
import torch

from learner.checkpoint.manifest import MANIFEST, read_manifest
from learner.checkpoint.store import (
    TENSORS,
    CheckpointState,
    abandon_after,
    committed_steps,
    newest_committed,
    open_tensors,
    step_folder,
    write_checkpoint,
)
from protocol.errors import ExitStatus, UserError


def make_state(step, *, numel=1000):
    values = np.full(numel, step, np.float32)  # numpy: torch's thread pool does not survive a fork
    return CheckpointState(step=step, tensors={"w": torch.from_numpy(values)}, scalars={"version": step})


def in_child(work):
    """Runs `work` in a forked process and returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def assert_holds(found, step):
    assert found.manifest.step == step and found.manifest.scalars == {"version": step}
    assert open_tensors(found.path)("w").unique().tolist() == [float(step)]


def test_newest_of_several_is_found_and_only_keep_remain(tmp_path):
    for step in (3, 7, 12):
        write_checkpoint(tmp_path, make_state(step), keep=2)
    assert committed_steps(tmp_path) == [7, 12]
    assert_holds(newest_committed(tmp_path), 12)


def test_b71_the_last_good_one_is_not_pruned_while_it_is_protected(tmp_path):
    for step in (2, 4, 6, 8):
        write_checkpoint(tmp_path, make_state(step), keep=1, protected_step=5)
    assert committed_steps(tmp_path) == [4, 8]
    write_checkpoint(tmp_path, make_state(10), keep=1)
    assert committed_steps(tmp_path) == [10]


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path):
    assert newest_committed(tmp_path).path is None
    assert newest_committed(tmp_path / "missing").path is None


@pytest.mark.parametrize("keep", [1, 2])
def test_b63_killed_at_random_moments_the_newest_committed_is_always_whole(tmp_path, keep):
    rng = random.Random(keep)
    started = time.monotonic()
    write_checkpoint(tmp_path, make_state(1, numel=200_000), keep=keep)
    seconds_per_save = time.monotonic() - started
    reached = 1
    for _ in range(25):

        def save_for_ever(first=reached + 1):
            for step in count(first):
                write_checkpoint(tmp_path, make_state(step, numel=200_000), keep=keep)

        pid = in_child(save_for_ever)
        deadline = time.monotonic() + 30
        while max(committed_steps(tmp_path)) == reached and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 2.0) * seconds_per_save)  # the moment of the kill, anywhere within a save
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = newest_committed(tmp_path)
        assert found.manifest is not None and found.manifest.step > reached
        assert_holds(found, found.manifest.step)
        reached = found.manifest.step
    write_checkpoint(tmp_path, make_state(reached + 1), keep=keep)
    assert len(list(tmp_path.iterdir())) <= keep, "left-overs of killed writers are removed"


@pytest.mark.parametrize("damage", ["no manifest", "bad manifest", "short file", "flipped byte", "file missing"])
def test_b64_a_damaged_newest_is_passed_over_with_the_reason(tmp_path, damage):
    for step in (1, 2):
        write_checkpoint(tmp_path, make_state(step), keep=5)
    newest = step_folder(tmp_path, 2)
    tensors = newest / TENSORS
    if damage == "no manifest":
        (newest / MANIFEST).unlink()
    elif damage == "bad manifest":
        (newest / MANIFEST).write_text("{")
    elif damage == "short file":
        os.truncate(tensors, tensors.stat().st_size - 1)
    elif damage == "flipped byte":
        content = bytearray(tensors.read_bytes())
        content[-1] ^= 1
        tensors.write_bytes(bytes(content))
    else:
        tensors.unlink()
    found = newest_committed(tmp_path)
    assert_holds(found, 1)
    assert len(found.skipped) == 1 and found.skipped[0].startswith("step_00000002: ")
    write_checkpoint(tmp_path, make_state(2), keep=5)  # the step is trained again
    assert_holds(newest_committed(tmp_path), 2)


def test_a_disk_that_fills_up_leaves_the_last_good_one_and_says_so(tmp_path):
    write_checkpoint(tmp_path, make_state(1), keep=1)

    def save_with_too_little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            write_checkpoint(tmp_path, make_state(2, numel=1_000_000), keep=1)
        except UserError as error:
            (tmp_path.parent / "error.json").write_text(json.dumps([int(error.status), str(error)]))

    os.waitpid(in_child(save_with_too_little_room), 0)
    status, message = json.loads((tmp_path.parent / "error.json").read_text())
    assert status == ExitStatus.DISK_FULL
    assert "step 1 is the last good one" in message
    assert_holds(newest_committed(tmp_path), 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_00000001"]


def test_b59_shortage_is_noticed_before_anything_is_written(tmp_path):
    write_checkpoint(tmp_path, make_state(1), keep=1)
    with pytest.raises(UserError, match=r"min_free_gb.*step 1 is the last good one"):
        write_checkpoint(tmp_path, make_state(2), keep=1, min_free_bytes=10**18)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_00000001"]


def test_an_unwritable_place_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not be written"):
        write_checkpoint(tmp_path / "file", make_state(1), keep=1)


def test_b65_later_steps_are_set_aside_not_mixed_in(tmp_path):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, make_state(step), keep=5)
    assert len(abandon_after(tmp_path, step=1)) == 2
    assert_holds(newest_committed(tmp_path), 1)
    write_checkpoint(tmp_path, make_state(2), keep=5)
    assert len(abandon_after(tmp_path, step=1)) == 1


def test_a_folder_of_another_format_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path, make_state(1), keep=1)
    raw = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(raw | {"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        read_manifest(folder)
