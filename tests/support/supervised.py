"""A whole run under the real local supervisor: `slipstream up`, SIGKILL to its roles, and what its ledger says."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deploy.local.control import is_same_process, read_state
from tests.support import ledger_queries
from tests.support.stack import load, write_config
from tests.support.wait import wait_until

DEADLINE_S = 240.0
"""For anything a loaded machine has to do, such as starting a trainer."""

ANSWER = "7"
"""Right for every prompt, so that about half of the scripted answers are."""

REAL_TRAINER: dict[str, Any] = {
    "trainer__device": "cpu",
    "trainer__threads_per_rank": 1,
    "trainer__batch_wait_s": 0.5,
    "data__max_prompt_tokens": 64,
    "sampling__max_response_tokens": 48,
    "learner__optim": {"lr": 1e-3},
    "learner__checkpoint": {"every_updates": 2, "min_free_gb": 0.0},
    "generators__engine_args": {"tokens_per_s": 60.0, "mean_tokens": 12, "answer": ANSWER},
    "deploy__backoff_s": 0.2,
    "deploy__max_backoff_s": 1.0,
    "deploy__min_free_gb": 0.0,
}
"""DeepSpeed on one CPU thread, a scripted sampler that receives the weights, restarts without much delay."""


class SupervisedRun:
    """One run folder; `up` may be called again after the supervisor ended or was killed."""

    def __init__(self, folder: Path, **overrides: Any) -> None:
        self.config_path = write_config(folder, **(REAL_TRAINER | overrides))
        rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
        rows = [row | {"reward_model": {"style": "rule", "ground_truth": ANSWER}} for row in rows]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.config = load(self.config_path)
        self.run_dir = self.config_path.parent
        self.supervisor: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """Starts `slipstream up --foreground`; returns once its state file is written."""
        (self.run_dir / "logs").mkdir(exist_ok=True)
        command = [sys.executable, "-m", "deploy", "up", "--foreground", "--config", str(self.config_path)]
        with (self.run_dir / "logs" / "supervisor.log").open("ab") as log:
            self.supervisor = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        pid = self.supervisor.pid
        self.wait_for(lambda: (read_state(self.run_dir) or {}).get("pid") == pid, what="supervisor")

    def role(self, name: str) -> dict[str, Any]:
        """What the supervisor says of one instance."""
        state = read_state(self.run_dir) or {"roles": []}
        return next((role for role in state["roles"] if role["name"] == name), {"pids": [], "num_restarts": 0})

    def kill(self, name: str) -> None:
        """SIGKILL to the processes of one instance (not to the rest of their sessions), which runs."""
        self.wait_for(lambda: self.role(name)["pids"], what=f"{name} running")
        for pid in self.role(name)["pids"]:
            os.kill(pid, signal.SIGKILL)

    def lose_power(self) -> None:
        """SIGKILL to everything; the supervisor is frozen first, so that nobody gets to say anything."""
        assert self.supervisor is not None
        state = read_state(self.run_dir)
        self.supervisor.send_signal(signal.SIGSTOP)
        for role in state["roles"] if state else []:
            for pid in role["pids"]:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        self.supervisor.kill()
        self.supervisor.wait(30)

    def wait_until_trained(self, num_batches: int) -> None:
        """Until so many batches are counted as trained."""
        self.wait_for(lambda: self.num_trained() >= num_batches, what=f"{num_batches} trained batches")

    def wait_for(self, condition: Any, *, what: str) -> None:
        """Fails with the ends of all logs when the supervisor ends or the deadline passes first."""

        def met() -> Any:
            assert self.supervisor is not None and self.supervisor.poll() is None, "the supervisor ended"
            return condition()

        try:
            wait_until(met, deadline_s=DEADLINE_S, what=what)
        except AssertionError as failure:
            raise AssertionError(f"{failure}\n{self.logs()}") from None

    def wait_for_end(self) -> int:
        """The supervisor's exit status once the run is over."""
        assert self.supervisor is not None
        try:
            return self.supervisor.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end\n{self.logs()}") from None

    def num_trained(self) -> int:
        """Batches counted as trained; 0 while there is no ledger."""
        return ledger_queries.num_trained_batches(self.run_dir)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of the ledger."""
        return ledger_queries.query(self.run_dir, sql)

    def logs(self, *, num_chars: int = 3000) -> str:
        """The ends of all logs."""
        files = sorted((self.run_dir / "logs").glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-num_chars:]}" for file in files)

    def close(self) -> None:
        """Kills what is left of the run."""
        if self.supervisor is not None and self.supervisor.poll() is None:
            self.lose_power()
        for role in (read_state(self.run_dir) or {"roles": []})["roles"]:
            for pid, created in zip(role["pids"], role["created"], strict=False):
                if is_same_process(pid, created):
                    os.killpg(pid, signal.SIGKILL)


@contextmanager
def supervised_run(folder: Path, **overrides: Any) -> Iterator[SupervisedRun]:
    """A started run that is gone afterwards."""
    run = SupervisedRun(folder, **overrides)
    try:
        run.up()
        yield run
    finally:
        run.close()
