"""The trainer as a process: signals, the real publisher, several ranks."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from learner.checkpoint.store import committed_steps
from protocol.errors import ExitStatus
from protocol.messages import BatchTrained, ResumeRequest, ShardRequest
from tests.learner.trainer.coordinator import ScriptedCoordinator
from tests.support.tiny_model import build_tiny_model
from tests.support.training import tiny_config

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SPLITS = {1: [[[0, 1, 2], [3, 4], [5, 6, 7]]], 2: [[[5, 0], [1, 2]], [[3, 4, 6, 7], []]]}
DEADLINE_S = 120.0
ENTRY = """
import sys
from learner.trainer.main import run
from protocol.config import Config
from protocol.errors import UserError
try:
    sys.exit(run(Config.model_validate_json(open(sys.argv[1]).read()), name="trainer"))
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(error.status)
"""


@pytest.fixture
def launch(tmp_path):
    """Starts a coordinator and the trainer's ranks; everything is gone at the end."""
    model = build_tiny_model(tmp_path / "model")
    processes, coordinators = [], []

    def start(num_ranks, *, num_batches, on_body=lambda body: None, max_skipped=5):
        config = tiny_config(
            model,
            tmp_path / "run",
            run={"max_skipped_updates": max_skipped},
            trainer={"num_ranks": num_ranks, "batch_wait_s": 0.2},
            learner={"checkpoint": {"every_updates": 1000, "min_free_gb": 0.0}},
            coordinator={"listen": "tcp://127.0.0.1:0"},
            transport={"heartbeat_s": 0.2, "peer_timeout_s": 5.0},
        )
        coordinator = ScriptedCoordinator(config, splits=SPLITS[num_ranks], num_batches=num_batches, on_body=on_body)
        coordinators.append(coordinator)
        config = config.model_copy(
            update={"coordinator": config.coordinator.model_copy(update={"listen": coordinator.address})}
        )
        file = tmp_path / "config.json"
        file.write_text(config.model_dump_json())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        ranks = []
        for rank in range(num_ranks):
            place = {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
            environment = os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            log = (tmp_path / f"rank{rank}.log").open("w")
            ranks.append(
                subprocess.Popen([sys.executable, "-c", ENTRY, str(file)], env=environment, stdout=log, stderr=log)
            )
        processes.extend(ranks)
        return coordinator, ranks

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait(10)
    for coordinator in coordinators:
        coordinator.close()


def exit_statuses(ranks):
    deadline = time.monotonic() + DEADLINE_S
    return [rank.wait(max(0.1, deadline - time.monotonic())) for rank in ranks]


def log_of(tmp_path: Path) -> str:
    return "".join(file.read_text() for file in sorted(tmp_path.glob("rank*.log")))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_whole_run_ends_with_status_0_a_checkpoint_and_an_export(launch, tmp_path, num_ranks):
    coordinator, ranks = launch(num_ranks, num_batches=3)
    assert exit_statuses(ranks) == [0] * num_ranks, log_of(tmp_path)
    assert [body.batch_id for body in coordinator.of(BatchTrained)] == [1, 2, 3]
    assert sorted({body.rank for body in coordinator.of(ShardRequest)}) == list(range(num_ranks))
    assert coordinator.of(ResumeRequest) == [ResumeRequest(last_batch_id=0, policy_version=0, num_ranks=num_ranks)]
    assert committed_steps(tmp_path / "run" / "checkpoints") == [3]
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


@pytest.mark.parametrize("signalled_rank", [0, 1])
def test_b57_a_signal_to_any_rank_stops_all_at_the_same_step_with_a_checkpoint(launch, tmp_path, signalled_rank):
    ranks = []

    def on_body(body):
        if isinstance(body, BatchTrained) and body.batch_id == 2:
            ranks[signalled_rank].send_signal(signal.SIGTERM)

    coordinator, started = launch(2, num_batches=10_000, on_body=on_body)
    ranks.extend(started)
    assert exit_statuses(ranks) == [ExitStatus.STOPPED] * 2, log_of(tmp_path)
    assert committed_steps(tmp_path / "run" / "checkpoints") == [coordinator.of(BatchTrained)[-1].batch_id]


def test_a_killed_trainer_leaves_the_lineage_to_be_resumed(launch, tmp_path):
    ranks = []

    def on_body(body):
        if isinstance(body, BatchTrained) and body.batch_id == 2:
            ranks[0].kill()

    _, started = launch(1, num_batches=4, on_body=on_body)
    ranks.extend(started)
    exit_statuses(ranks)
    coordinator, again = launch(1, num_batches=4)
    assert exit_statuses(again) == [0], log_of(tmp_path)
    assert [body.batch_id for body in coordinator.of(BatchTrained)] == [1, 2, 3, 4]
