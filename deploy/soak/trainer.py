"""A trainer stand-in as a process: takes batches, checks their shards, trains nothing, checkpoints, resumes, replays.

``python -m deploy.soak.trainer CONFIG FOLDER``. FOLDER/lineage.jsonl records, before each report to the
coordinator, what it "trained": {"resume": batch_id} at a start and {"batch_id", "version", "slots"} per batch.
FOLDER/checkpoint.json is the newest checkpoint, renamed into place. FOLDER/overruns.jsonl lists waits that lasted
longer than their deadline, in seconds during which this process was running.
"""

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from protocol import messages as m
from protocol.config import Config
from protocol.config.load import load_config
from protocol.errors import ExitStatus, PeerUnreachable, UserError
from protocol.logs import event, setup_logging
from protocol.sockets import Client, Received, make_hello
from protocol.versions import tokenizer_hash

log = logging.getLogger(__name__)

CHECKPOINT_EVERY = 3
REQUEST_S = 3.0
MARGIN_S = 1.5
TICK_S = 0.1


class AwakeClock:
    """Seconds this process was running: stretches without a tick (stopped by a signal) count as one tick."""

    def __init__(self) -> None:
        self._awake = 0.0
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        pause, last = threading.Event(), monotonic()
        while True:
            pause.wait(TICK_S)
            now = monotonic()
            self._awake += min(now - last, 3 * TICK_S)
            last = now

    def now(self) -> float:
        return self._awake


class StandIn:
    """One life of the trainer."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._clock = AwakeClock()
        self._lineage = (folder / "lineage.jsonl").open("a")
        self._stop = threading.Event()
        hello = make_hello("trainer", name="trainer", tokenizer_hash=tokenizer_hash(config.model.path))
        self._client = Client(
            config.coordinator.advertise or config.coordinator.listen,
            hello=hello,
            transport=config.transport,
            heartbeat=lambda: m.Heartbeat(state="training", policy_version=self._version),
        )
        checkpoint = folder / "checkpoint.json"
        found = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"batch_id": 0, "version": 0}
        self._batch, self._version = int(found["batch_id"]), int(found["version"])

    def run(self) -> int:
        """Exit status: 0 finished, 143 stopped."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        try:
            self._client.start(deadline_s=self._config.transport.connect_deadline_s)
            plan = self._ask(m.ResumeRequest(last_batch_id=self._batch, policy_version=self._version, num_ranks=1))
            assert isinstance(plan, m.ResumePlan), plan
            self._write({"resume": self._batch})
            while True:
                body = self._ask(m.BatchRequest(after_batch_id=self._batch, policy_version=self._version, wait_s=1.0))
                if isinstance(body, m.BatchPlan):
                    self._train(body, plan)
                elif not isinstance(body, m.BatchNotReady):
                    raise RuntimeError(f"no batch: {body}")
                elif body.waiting_for in ("finished", "stopped"):
                    return int(ExitStatus.FINISHED)
        except InterruptedError:
            return int(ExitStatus.STOPPED)
        except UserError as error:
            event(log, logging.CRITICAL, str(error), exit_status=int(error.status))
            return int(error.status)
        finally:
            self._client.close(deadline_s=1.0)

    def _train(self, plan: m.BatchPlan, resume: m.ResumePlan) -> None:
        self._check_shard(plan)
        slots = [[item.group_id, item.slot] for item in plan.items]
        version = plan.policy_version + 1
        self._write({"batch_id": plan.batch_id, "version": version, "slots": slots})
        eta = self._config.algorithm.max_staleness
        ages = [plan.policy_version - item.min_version for item in plan.items]
        trained = m.BatchTrained(
            batch_id=plan.batch_id,
            attempt=resume.attempt,
            policy_version=version,
            num_applied=1,
            num_skipped=0,
            replayed=plan.batch_id in resume.replay,
            num_trained_tokens=sum(item.num_response_tokens for item in plan.items),
            num_stale_tokens=sum(i.num_response_tokens for i, age in zip(plan.items, ages, strict=True) if age > eta),
            max_token_staleness=max(ages),
        )
        answer = self._ask(trained)
        assert isinstance(answer, m.Ack), answer
        self._batch, self._version = plan.batch_id, version
        self._ask(m.VersionPublished(policy_version=version, epoch=1, generators=[], seconds=0.0))
        if self._batch % CHECKPOINT_EVERY == 0:
            self._checkpoint()

    def _check_shard(self, plan: m.BatchPlan) -> None:
        received = self._receive(m.ShardRequest(batch_id=plan.batch_id, rank=0, num_ranks=1))
        assert isinstance(received.body, m.Shard), received.body
        assert sorted(received.body.indices) == list(range(len(plan.items))), "a shard of one rank is the whole batch"
        for index, item in enumerate(plan.items):
            versions = received.arrays[f"{index}/versions"]
            num_tokens = item.num_prompt_tokens + item.num_response_tokens
            assert received.arrays[f"{index}/token_ids"].shape == (num_tokens,)
            assert versions.shape == (item.num_response_tokens,) and int(versions.min()) == item.min_version
            assert np.isfinite(received.arrays[f"{index}/logp_behaviour"]).all()

    def _checkpoint(self) -> None:
        path = self._folder / "checkpoint.tmp"
        path.write_text(json.dumps({"batch_id": self._batch, "version": self._version}))
        os.rename(path, self._folder / "checkpoint.json")
        self._ask(m.CheckpointCommitted(batch_id=self._batch, policy_version=self._version, path="checkpoint.json"))

    def _ask(self, body: m.AnyBody) -> m.AnyBody:
        return self._receive(body).body

    def _receive(self, body: m.AnyBody) -> Received:
        """The answer, however often it takes to ask; each wait is held to its deadline."""
        while not self._stop.is_set():
            begin = self._clock.now()
            future = self._client.request(body, deadline_s=REQUEST_S)
            try:
                return future.result(timeout=10 * REQUEST_S)
            except (PeerUnreachable, TimeoutError):
                self._stop.wait(0.1)
            finally:
                took = self._clock.now() - begin
                if took > REQUEST_S + MARGIN_S:
                    with (self._folder / "overruns.jsonl").open("a") as file:
                        file.write(json.dumps({"body": type(body).__name__, "seconds": took}) + "\n")
        raise InterruptedError

    def _write(self, record: dict[str, Any]) -> None:
        self._lineage.write(json.dumps(record) + "\n")
        self._lineage.flush()
        os.fsync(self._lineage.fileno())


def surviving(lineage: Path) -> list[dict[str, Any]]:
    """The batches of the surviving lineage: what came after a resumed batch was trained by a trainer that died."""
    batches: list[dict[str, Any]] = []
    lines = lineage.read_text().splitlines() if lineage.exists() else []
    for line in lines:
        record = json.loads(line)
        if "resume" in record:
            batches = [batch for batch in batches if batch["batch_id"] <= record["resume"]]
        elif not batches or batches[-1]["batch_id"] != record["batch_id"]:
            batches.append(record)
        else:  # reported, not acknowledged, and taken up again in the same life
            assert batches[-1]["slots"] == record["slots"], "one batch id, two contents"
    return batches


if __name__ == "__main__":
    setup_logging("trainer", "trainer")
    sys.exit(StandIn(load_config(sys.argv[1]).config, Path(sys.argv[2])).run())
