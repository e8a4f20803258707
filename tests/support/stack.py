"""The real roles as processes on the tiny model, and a trainer stand-in that consumes batches without training."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from learner.coordinator.schema import ledger_summary, open_database
from protocol import messages as m
from protocol.config import Config
from protocol.errors import UserError
from protocol.sockets import Client, make_hello
from protocol.versions import tokenizer_hash
from tests.support import ledger_queries
from tests.support.tiny_model import build_tiny_model

BASE: dict[str, Any] = {
    "run": {"max_updates": 6},
    "sampling": {"max_response_tokens": 24},
    "learner": {"groups_per_batch": 4, "group_size": 4, "max_tokens_per_micro_batch": 1024},
    "evaluation": {"at_start": False, "at_end": False},
    "coordinator": {"lease_deadline_s": 6.0},
    "generators": {
        "backend": "scripted",
        "max_num_seqs": 16,
        "drain_s": 1.0,
        "engine_args": {"tokens_per_s": 100.0, "mean_tokens": 12, "receive": False},
    },
    "rewardd": {"code": {"enabled": False}},
    "transport": {"heartbeat_s": 0.3, "peer_timeout_s": 3.0, "ack_deadline_s": 5.0},
    "deploy": {"stop_grace_s": 10.0},
}


def free_port() -> int:
    """A port nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_rows(path: Path, num: int) -> Path:
    """`num` sums as JSON lines in the field's columns."""
    import json

    rows = (
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i} + 1 = ?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i},
        }
        for i in range(num)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_config(folder: Path, *, num_rows: int = 64, **overrides: Any) -> Path:
    """RUN_DIR/config.yaml of a small run on the tiny model; `overrides` are dotted keys with "." written "__"."""
    import copy

    tree = copy.deepcopy(BASE)
    run_dir = folder / "run"
    run_dir.mkdir(parents=True, exist_ok=True)
    tree["run"]["dir"] = str(run_dir)
    tree["model"] = {"path": str(build_tiny_model(folder / "model")), "dtype": "float32"}
    tree["data"] = {"train_files": [str(write_rows(folder / "train.jsonl", num_rows))]}
    tree["coordinator"]["listen"] = f"tcp://127.0.0.1:{free_port()}"
    for dotted, value in overrides.items():
        *sections, key = dotted.split("__")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    path = run_dir / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    Config.model_validate(tree)
    return path


def load(path: Path) -> Config:
    """The configuration a stack runs with."""
    return Config.model_validate(yaml.safe_load(path.read_text()))


class Stack:
    """Starts, kills and restarts role processes of one run; logs lie in RUN_DIR/logs."""

    def __init__(self, config_path: Path) -> None:
        self.config_path = config_path
        self.config = load(config_path)
        self.run_dir = Path(self.config.run.dir)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (self.run_dir / "logs").mkdir(exist_ok=True)

    def start(self, role: str, name: str = "", **environment: str) -> subprocess.Popen[bytes]:
        """One more process of `role`; a name that runs already is an error of the test."""
        name = name or role
        command = [sys.executable, "-m", "deploy", role, "--config", str(self.config_path), "--name", name]
        return self.spawn(name, command, **environment)

    def spawn(self, name: str, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        """A process of another kind, looked after as a role's."""
        with (self.run_dir / "logs" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)
        self.processes[name] = process
        return process

    def kill(self, name: str) -> None:
        """kill -9 and reap."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait(10)

    def restart(self, name: str, *, role: str) -> None:
        """kill -9, then start again under the same name."""
        self.kill(name)
        self.start(role, name)

    def log(self, name: str) -> str:
        """What the process printed so far."""
        return (self.run_dir / "logs" / f"{name}.log").read_text(errors="replace")

    def ledger(self) -> dict[str, int]:
        """The conservation equation, read from the database."""
        database = open_database(self.run_dir / "coordinator" / "ledger.sqlite")
        try:
            return dict(ledger_summary(database))
        finally:
            database.close()

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of the ledger."""
        return ledger_queries.query(self.run_dir, sql)

    def num_trained(self) -> int:
        """Batches counted as trained; 0 while there is no ledger."""
        return ledger_queries.num_trained_batches(self.run_dir)

    def close(self) -> None:
        """Stops everything this stack started."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        for process in self.processes.values():
            process.wait(10)


@contextmanager
def running_stack(config_path: Path) -> Iterator[Stack]:
    """A stack that is gone afterwards."""
    stack = Stack(config_path)
    try:
        yield stack
    finally:
        stack.close()


class StandInTrainer(threading.Thread):
    """Consumes batches as trainer rank 0 would, "publishes" each version at once, stops at "finished"."""

    def __init__(self, config: Config, *, seconds_per_batch: float = 0.05) -> None:
        super().__init__(daemon=True)
        self._config = config
        self._pause = threading.Event()
        self._seconds = seconds_per_batch
        self.trained: list[m.BatchPlan] = []
        self.ended_with = ""

    def run(self) -> None:
        config = self._config
        hello = make_hello("trainer", name="trainer", tokenizer_hash=tokenizer_hash(config.model.path))
        client = Client(config.coordinator.listen, hello=hello, transport=config.transport)
        client.start(deadline_s=60.0)
        try:
            self._consume(client)
        finally:
            client.close(deadline_s=1.0)

    def _ask(self, client: Client, body: m.AnyBody) -> m.AnyBody:
        for _ in range(200):
            try:
                return client.request(body, deadline_s=5.0).result(6.0).body
            except (UserError, TimeoutError):
                self._pause.wait(0.1)
        raise AssertionError(f"no answer to {type(body).__name__}")

    def _consume(self, client: Client) -> None:
        plan = self._ask(client, m.ResumeRequest(last_batch_id=0, policy_version=0, num_ranks=1))
        assert isinstance(plan, m.ResumePlan), plan
        last, version = 0, 0
        while True:
            batch = self._ask(client, m.BatchRequest(after_batch_id=last, policy_version=version, wait_s=1.0))
            if isinstance(batch, m.BatchNotReady):
                if batch.waiting_for in ("finished", "stopped"):
                    self.ended_with = batch.waiting_for
                    return
                continue
            assert isinstance(batch, m.BatchPlan), batch
            self._pause.wait(self._seconds)
            last, version = batch.batch_id, batch.policy_version + 1
            tokens = sum(item.num_response_tokens for item in batch.items)
            staleness = max(batch.policy_version - item.min_version for item in batch.items)
            trained = m.BatchTrained(
                batch_id=last,
                attempt=plan.attempt,
                policy_version=version,
                num_applied=1,
                num_skipped=0,
                replayed=False,
                num_trained_tokens=tokens,
                num_stale_tokens=0,
                max_token_staleness=staleness,
            )
            self._ask(client, trained)
            self._ask(client, m.VersionPublished(policy_version=version, epoch=1, generators=[], seconds=0.0))
            self.trained.append(batch)
