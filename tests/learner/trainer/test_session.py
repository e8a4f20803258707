"""The trainer's loop against a scripted coordinator on a real socket: flow, resume, restarts, stops, export."""

import shutil
import threading
from pathlib import Path

import pytest
import torch

from learner.checkpoint import store
from learner.checkpoint.store import committed_steps, newest_committed
from learner.trainer.coordination import Coordination
from learner.trainer.engine import TrainerEngine
from learner.trainer.session import Session
from learner.trainer.status import TrainerStatus
from learner.trainer.stop import StopSignal
from protocol.errors import ExitStatus, UserError
from protocol.messages import BatchTrained, CheckpointCommitted, Heartbeat, ResumeRequest
from tests.learner.trainer.coordinator import ScriptedCoordinator
from tests.support.tiny_model import build_tiny_model
from tests.support.training import tiny_config

pytestmark = pytest.mark.engine

SPLIT = [[[0, 1, 2], [3, 4], [5, 6, 7]]]


class RecordingPublisher:
    """Stands in for the weight publisher."""

    def __init__(self):
        self.snapshots = []

    def submit(self, snapshot):
        self.snapshots.append(snapshot)

    def wait_idle(self, deadline_s):
        return True

    @property
    def versions(self):
        return [snapshot.policy_version for snapshot in self.snapshots]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model_path, tmp_path):
    return tiny_config(
        model_path,
        tmp_path / "run",
        learner={"checkpoint": {"every_updates": 2, "min_free_gb": 0.0, "keep": 3}},
        coordinator={"listen": "tcp://127.0.0.1:0"},
        transport={"heartbeat_s": 0.2, "peer_timeout_s": 2.0, "request_deadline_s": 2.0},
        trainer={"batch_wait_s": 0.2},
    )


@pytest.fixture
def coordinator_of():
    started = []

    def start(config, **options):
        started.append(ScriptedCoordinator(config, splits=SPLIT, **options))
        return started[-1]

    yield start
    for coordinator in started:
        coordinator.close()


def changed(config, **sections):
    """The configuration with some keys of some sections replaced."""
    whole = config.model_dump()
    return type(config).model_validate(whole | {name: whole[name] | keys for name, keys in sections.items()})


def run_session(config, coordinator, *, stop=None):
    """One trainer's life on one rank: exit status (or error), engine and publisher."""
    config = changed(config, coordinator={"listen": coordinator.address})
    stop, status, publisher = stop or StopSignal(), TrainerStatus(), RecordingPublisher()
    engine = TrainerEngine(config, rank=0, num_ranks=1, device=torch.device("cpu"))
    link = Coordination(config, name="trainer", stop=stop, tokenizer_hash="t", heartbeat=status.heartbeat)
    link.start()
    try:
        session = Session(config, engine=engine, coordination=link, publisher=publisher, status=status, stop=stop)
        try:
            outcome = session.run()
        except UserError as error:
            outcome = error
    finally:
        link.close(deadline_s=2.0, reason="test")
        engine.close()
    return outcome, engine, publisher


def test_a_run_trains_reports_publishes_saves_and_exports(config, coordinator_of):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    coordinator = coordinator_of(config, num_batches=3, ending=("evaluating", "evaluating", "finished"))
    outcome, _, publisher = run_session(config, coordinator)
    assert outcome is ExitStatus.FINISHED
    assert [(b.batch_id, b.policy_version, b.replayed) for b in coordinator.of(BatchTrained)] == [
        (1, 1, False),
        (2, 2, False),
        (3, 3, False),
    ]
    assert publisher.versions == [1, 2, 3]
    assert [c.batch_id for c in coordinator.of(CheckpointCommitted)] == [2, 3]
    export = f"{config.run.dir}/export"
    model = AutoModelForCausalLM.from_pretrained(export)
    for name, tensor in publisher.snapshots[-1].tensors:
        torch.testing.assert_close(model.get_parameter(name), tensor, rtol=0, atol=0, check_device=False)
    assert AutoTokenizer.from_pretrained(export).eos_token_id == 258


def test_a_resumed_run_equals_an_uninterrupted_one_and_publishes_only_past_the_published_version(
    config, coordinator_of, tmp_path
):
    straight = changed(config, run={"dir": str(tmp_path / "straight")})
    _, _, expected = run_session(straight, coordinator_of(straight, num_batches=5))

    coordinator = coordinator_of(config, num_batches=3)
    run_session(config, coordinator)
    coordinator.close()
    for step in committed_steps(tmp_path / "run" / "checkpoints")[1:]:  # the newest save is lost with its disk
        (tmp_path / "run" / "checkpoints" / f"step_{step:08d}" / "COMMITTED").unlink()
    later = coordinator_of(config, num_batches=5)
    later.last_batch, later.version, later.published = 3, 3, 3
    outcome, _, publisher = run_session(config, later)
    assert outcome is ExitStatus.FINISHED
    assert later.of(ResumeRequest) == [ResumeRequest(last_batch_id=2, policy_version=2, num_ranks=1)]
    assert [(b.batch_id, b.replayed) for b in later.of(BatchTrained)] == [(3, True), (4, False), (5, False)]
    assert publisher.versions == [3, 4, 5]
    for (name, tensor), (other, reference) in zip(
        publisher.snapshots[-1].tensors, expected.snapshots[-1].tensors, strict=True
    ):
        assert name == other and torch.equal(tensor, reference)


def test_a_coordinator_that_restarts_is_waited_for(config, coordinator_of):
    restarted = threading.Event()
    coordinator = None

    def on_body(body):
        if isinstance(body, BatchTrained) and body.batch_id == 1 and not restarted.is_set():
            restarted.set()

            def restart():
                coordinator.close()
                coordinator.resume()

            threading.Thread(target=restart).start()

    coordinator = coordinator_of(config, num_batches=3, on_body=on_body)
    outcome, engine, _ = run_session(config, coordinator)
    assert outcome is ExitStatus.FINISHED and restarted.is_set()
    assert engine.policy_version == 3
    assert {b.batch_id for b in coordinator.of(BatchTrained)} == {1, 2, 3}


def test_b57_a_stop_signal_saves_at_the_next_batch_boundary(config, coordinator_of):
    stop = StopSignal()

    def on_body(body):
        if isinstance(body, BatchTrained) and body.batch_id == 1:
            stop.request()

    coordinator = coordinator_of(config, num_batches=100, on_body=on_body)
    outcome, engine, _ = run_session(config, coordinator, stop=stop)
    assert outcome is ExitStatus.STOPPED
    found = newest_committed(Path(config.run.dir) / "checkpoints")
    assert found.manifest.step == engine.last_batch_id == 1


def test_b01_a_row_of_skipped_updates_ends_the_trainer(config, coordinator_of, monkeypatch):
    config = changed(config, run={"max_skipped_updates": 2})
    coordinator = coordinator_of(config, num_batches=100)
    original = coordinator.batch

    def all_stale(batch_id):
        batch = original(batch_id)
        for arrays in batch.arrays.values():
            arrays.versions[:] = -5
        return batch

    monkeypatch.setattr(coordinator, "batch", all_stale)
    outcome, engine, publisher = run_session(config, coordinator)
    assert isinstance(outcome, UserError) and outcome.status is ExitStatus.NO_PROGRESS
    assert "2 updates in a row were skipped" in str(outcome)
    assert [(b.num_applied, b.num_skipped, b.policy_version) for b in coordinator.of(BatchTrained)] == [(0, 1, 0)] * 2
    assert engine.policy_version == 0 and publisher.versions == []


def test_b65_resuming_from_an_earlier_step_sets_the_later_ones_aside_once(config, coordinator_of, tmp_path):
    run_session(config, coordinator_of(config, num_batches=4))
    root = tmp_path / "run" / "checkpoints"
    assert committed_steps(root) == [2, 4]
    chosen = changed(
        config,
        learner={"checkpoint": config.learner.checkpoint.model_dump() | {"resume_from": f"{root}/step_00000002"}},
    )
    coordinator = coordinator_of(chosen, num_batches=3)
    coordinator.last_batch, coordinator.version, coordinator.published = 2, 2, 1  # what abandoning leaves
    _, _, publisher = run_session(chosen, coordinator)
    assert publisher.versions == [2, 3]
    assert committed_steps(root) == [2, 3]
    again = coordinator_of(chosen, num_batches=3)
    again.last_batch, again.version, again.published = 3, 3, 3
    run_session(chosen, again)
    assert again.of(ResumeRequest)[0].last_batch_id == 3


@pytest.fixture
def disk(monkeypatch):
    """A disk whose free bytes the test sets."""
    free = {"bytes": 1 << 40}
    real = shutil.disk_usage
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: real(path)._replace(free=free["bytes"]))
    return free


def test_b59_a_full_disk_pauses_the_run_says_so_and_it_goes_on_when_there_is_room(config, coordinator_of, disk):
    said, versions_while_full = [], []

    def on_body(body):
        if isinstance(body, BatchTrained) and body.batch_id == 3:
            disk["bytes"] = 0  # the save after batch 4 finds no room
        if isinstance(body, Heartbeat) and body.waiting_for == "disk":
            said.append(body.state)
            versions_while_full.append(body.policy_version)
            if len(said) == 3:
                disk["bytes"] = 1 << 40

    coordinator = coordinator_of(config, num_batches=7, on_body=on_body)
    outcome, engine, _ = run_session(config, coordinator)
    assert outcome is ExitStatus.FINISHED and engine.last_batch_id == 7
    assert len(said) >= 3 and max(versions_while_full) - min(versions_while_full) == 0, "nothing was trained meanwhile"
    committed = [c.batch_id for c in coordinator.of(CheckpointCommitted)]
    assert committed[0] == 2 and committed[-1] == 7
    assert newest_committed(Path(config.run.dir) / "checkpoints").manifest.step == 7


def test_a_stop_while_the_disk_is_full_keeps_the_last_good_one_and_is_no_success(config, coordinator_of, disk):
    stop = StopSignal()

    def on_body(body):
        if isinstance(body, BatchTrained) and body.batch_id == 3:
            disk["bytes"] = 0
        if isinstance(body, Heartbeat) and body.waiting_for == "disk":
            stop.request()

    outcome, *_ = run_session(config, coordinator_of(config, num_batches=100, on_body=on_body), stop=stop)
    assert isinstance(outcome, UserError) and outcome.status is ExitStatus.DISK_FULL
    assert "step 2 is the last good one" in str(outcome)
    assert newest_committed(Path(config.run.dir) / "checkpoints").manifest.step == 2


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(config, coordinator_of, tmp_path):
    run_session(config, coordinator_of(config, num_batches=2))
    other = build_tiny_model(tmp_path / "other", tied=False)
    changed_model = changed(config, model={"path": str(other)})
    outcome, engine, _ = run_session(changed_model, coordinator_of(changed_model, num_batches=2))
    assert isinstance(outcome, UserError)
    assert "another model: lm_head.weight is None there" in str(outcome)
    assert engine.policy_version == 0
