"""Saving in the background."""

import threading

import pytest
import torch

from learner.checkpoint.store import CheckpointState, newest_committed
from learner.checkpoint.writer import CheckpointWriter
from protocol.config.learner import CheckpointSection
from protocol.errors import UserError


def make_state(step):
    return CheckpointState(step=step, tensors={"w": torch.full((10,), float(step))}, scalars={})


def test_training_goes_on_while_a_save_runs_and_the_next_save_waits(tmp_path):
    entered, release, committed = threading.Event(), threading.Event(), []

    def on_committed(state, folder):
        committed.append((state.step, folder.name))
        entered.set()
        assert release.wait(10)

    writer = CheckpointWriter(tmp_path, CheckpointSection(min_free_gb=0.0), on_committed=on_committed)
    writer.submit(make_state(1), deadline_s=10)
    assert entered.wait(10)
    assert writer.busy
    with pytest.raises(TimeoutError):
        writer.submit(make_state(2), deadline_s=0.01)
    release.set()
    writer.submit(make_state(2), deadline_s=10)
    writer.close(deadline_s=10)
    assert committed == [(1, "step_00000001"), (2, "step_00000002")]
    assert newest_committed(tmp_path).manifest.step == 2


def test_in_the_foreground_the_save_is_done_when_submit_returns(tmp_path):
    section = CheckpointSection(in_background=False, min_free_gb=0.0)
    writer = CheckpointWriter(tmp_path, section, on_committed=lambda state, folder: None)
    writer.submit(make_state(4), deadline_s=10)
    assert newest_committed(tmp_path).manifest.step == 4
    writer.close(deadline_s=10)


def test_a_failed_save_is_reported_once_and_the_next_can_succeed(tmp_path):
    section = CheckpointSection(min_free_gb=1e9)
    writer = CheckpointWriter(tmp_path, section, on_committed=lambda state, folder: None)
    writer.submit(make_state(1), deadline_s=10)
    with pytest.raises(UserError, match="min_free_gb"):
        writer.wait(deadline_s=10)
    writer.wait(deadline_s=10)
    writer.close(deadline_s=10)
