"""The coordinator as a real process behind real sockets: kill -9 in mid-run, taken ports, bad folders."""

import json
import signal
import socket
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from learner.coordinator.schema import ledger_summary
from protocol import messages as m
from protocol.config import Config
from protocol.errors import PeerUnreachable
from protocol.sockets import Client, Received, make_hello
from tests.learner.coordinator.harness import answer, make_config, rows, trained
from tests.learner.coordinator.process import free_port, start


class Script:
    """Generator, reward daemon and trainer in one thread; repeats whatever a dead coordinator did not answer."""

    def __init__(self, config: Config, address: str) -> None:
        self._clients = {
            role: Client(
                address,
                hello=make_hello(
                    role, name=role, attributes={"address": "tcp://127.0.0.1:1"} if role == "rewardd" else {}
                ),  # type: ignore[arg-type]
                transport=config.transport,
            )
            for role in ("generator", "rewardd", "trainer")
        }
        self.statuses: Counter[str] = Counter()
        self.trained: list[int] = []
        self.finished = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        for client in self._clients.values():
            client.start(deadline_s=20.0)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=20.0)
        for client in self._clients.values():
            client.close(deadline_s=0.5)

    def ask(self, role: str, body: Any, arrays: Any = None) -> Any:
        while not self._stop.is_set():
            future: Future[Received] = self._clients[role].request(body, arrays=arrays, deadline_s=5.0)
            try:
                return future.result(timeout=6.0).body
            except (PeerUnreachable, TimeoutError):
                continue
        raise RuntimeError("stopped")

    def _work(self) -> None:
        try:
            self.ask("trainer", m.ResumeRequest(last_batch_id=0, policy_version=0, num_ranks=1))
            version = batch = 0
            while not self._stop.is_set():
                grant = self.ask("generator", m.LeaseRequest(max_slots=16, policy_version=version))
                for lease in grant.leases:
                    for slot in lease.slots:
                        ack = self.ask("rewardd", *answer(lease, slot, score=float(slot % 2), num_tokens=200 % 60 + 4))
                        self.statuses[ack.status] += 1
                reply = self.ask("trainer", m.BatchRequest(after_batch_id=batch, policy_version=version, wait_s=0.2))
                if isinstance(reply, m.BatchPlan):
                    self.ask("trainer", m.ShardRequest(batch_id=reply.batch_id, rank=0, num_ranks=1))
                    self.ask("trainer", trained(reply))
                    self.trained.append(reply.batch_id)
                    version, batch = reply.policy_version + 1, reply.batch_id
                elif reply.waiting_for == "finished":
                    self.finished.set()
                    return
        except RuntimeError:
            return


@pytest.mark.slow
def test_b31_b38_kill_minus_9_in_mid_run_loses_and_doubles_nothing(tmp_path):
    port = free_port()
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows(50)))
    config = make_config(
        tmp_path,
        **{
            "coordinator.listen": f"tcp://127.0.0.1:{port}",
            "run.max_updates": 60,
            "learner.groups_per_batch": 4,
            "learner.group_size": 4,
        },
    )
    database = Path(config.run.dir) / "coordinator" / "ledger.sqlite"
    process = start(config, tmp_path)
    script = Script(config, f"tcp://127.0.0.1:{port}")
    try:
        script.start()
        for kills in range(1, 4):
            deadline = monotonic() + 40.0
            while len(script.trained) < 10 * kills and monotonic() < deadline:
                script.finished.wait(0.02)
            assert len(script.trained) >= 10 * kills
            process.kill()
            process.wait()
            assert ledger_summary(database)["balanced"]
            process = start(config, tmp_path)
        assert script.finished.wait(60.0), (tmp_path / "coordinator.log").read_text()[-3000:]
    finally:
        script.close()
    assert process.wait(timeout=20.0) == 0
    summary = ledger_summary(database)
    assert summary["balanced"] and summary["in_flight"] == 0
    assert summary["trained"] == 60 * 16
    assert script.trained == list(range(1, 61))
    records = [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]
    assert [record["batch_id"] for record in records] == list(range(1, 61))


def test_b58_taken_port_and_bad_data_are_one_clear_line(tmp_path):
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows(3)))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        process = start(make_config(tmp_path, **{"coordinator.listen": f"tcp://127.0.0.1:{port}"}), tmp_path)
        assert process.wait(timeout=30.0) == 64
    (tmp_path / "train.jsonl").unlink()
    process = start(make_config(tmp_path), tmp_path)
    assert process.wait(timeout=30.0) == 64
    lines = [line for line in (tmp_path / "coordinator.log").read_text().splitlines() if line.startswith("error: ")]
    assert f"coordinator.listen = tcp://127.0.0.1:{port}" in lines[0]
    assert "train.jsonl does not exist" in lines[1]


def test_sigterm_is_an_orderly_stop_that_a_restart_continues(tmp_path):
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows(5)))
    port = free_port()
    config = make_config(tmp_path, **{"coordinator.listen": f"tcp://127.0.0.1:{port}"})
    process = start(config, tmp_path)
    client = Client(f"tcp://127.0.0.1:{port}", hello=make_hello("client", name="cli"), transport=config.transport)
    try:
        run_id = client.start(deadline_s=30.0).run_id
        status = client.request(m.StatusRequest(), deadline_s=5.0).result(timeout=6.0).body
        assert status.run_state == "running" and "missing_generators" in " ".join(status.alarms)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10.0) == 143
        process = start(config, tmp_path)
        deadline = monotonic() + 20.0
        while True:
            try:
                again = client.request(m.StatusRequest(), deadline_s=5.0).result(timeout=6.0).body
                break
            except (PeerUnreachable, TimeoutError):
                assert monotonic() < deadline
        assert again.run_id == run_id
    finally:
        client.close(deadline_s=0.5)
        process.kill()
        process.wait()
