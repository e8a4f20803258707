"""Daemons and trajectories for tests of the reward daemon."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import yaml

from protocol.config.tree import Config
from protocol.messages import SamplingParams, Trajectory
from tests.support.wait import wait_until

TRANSPORT = {"heartbeat_s": 0.2, "peer_timeout_s": 2.0, "connect_deadline_s": 20.0, "ack_deadline_s": 5.0}

SAMPLING = SamplingParams(
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    min_p=0.0,
    max_tokens=64,
    min_tokens=0,
    stop_token_ids=(0,),
    stop=(),
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=None,
)


def trajectory(
    group_id: int,
    prompt_id: str,
    response: str,
    *,
    slot: int = 0,
    num_prompt: int = 3,
    num_response: int = 5,
    **changes,
) -> tuple[Trajectory, dict[str, np.ndarray]]:
    """A sound trajectory and its arrays."""
    fields = {
        "group_id": group_id,
        "slot": slot,
        "attempt": 1,
        "prompt_id": prompt_id,
        "generator": "generator-0",
        "purpose": "train",
        "stage": 0,
        "num_prompt_tokens": num_prompt,
        "num_response_tokens": num_response,
        "finish_reason": "stop",
        "stop_reason": "0",
        "sampling": SAMPLING,
        "response_text": response,
        "tokenizer_hash": "t",
        "seconds": 1.0,
    }
    arrays = {
        "token_ids": np.arange(num_prompt + num_response, dtype=np.int32),
        "logp_behaviour": np.full(num_response, -0.5, np.float32),
        "versions": np.zeros(num_response, np.int32),
        "loss_mask": np.ones(num_response, np.uint8),
    }
    return Trajectory(**(fields | changes)), arrays


def write_config(folder: Path, *, coordinator: str, **rewardd: object) -> Path:
    """A configuration file of a run whose coordinator listens at `coordinator`."""
    config = {
        "model": {"path": str(folder / "no-model")},
        "data": {"train_files": ["none"]},
        "coordinator": {"listen": coordinator},
        "transport": TRANSPORT,
        "rewardd": rewardd,
        "deploy": {"stop_grace_s": 10.0},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def load(path: Path) -> Config:
    """The configuration in a file of `write_config`."""
    return Config.model_validate(yaml.safe_load(path.read_text()))


class Process(subprocess.Popen[str]):
    """A process whose first output line was its address."""

    address: str


@contextmanager
def python(module: str, *args: str) -> Iterator[Process]:
    """A Python module that prints its address first, killed at the end."""
    process = Process([sys.executable, "-m", module, *args], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.address = process.stdout.readline().strip()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


@contextmanager
def daemon(config: Path, *, name: str = "rewardd-0", prefix: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """A reward daemon in a process of its own, killed at the end if it still runs.

    `prefix`: a command that runs the command after it.
    """
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from protocol.logs import setup_logging\n"
        "from rewardd.main import run\n"
        "from tests.rewardd.support import load\n"
        "setup_logging('rewardd', sys.argv[2])\n"
        "sys.exit(run(load(Path(sys.argv[1])), name=sys.argv[2]))\n"
    )
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", code, str(config), name],
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def children_of(pid: int) -> list[int]:
    """Live descendants of a process."""
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def is_gone(pid: int) -> bool:
    """Whether a process has ended; that pid 1 has not reaped an orphan yet is not its former parent's doing."""
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE and process.ppid() == 1
    except psutil.NoSuchProcess:
        return True


def wait_gone(pids: list[int]) -> None:
    """Wait until none of the processes is alive."""
    wait_until(lambda: all(is_gone(pid) for pid in pids), what=f"end of {pids}")
