"""Faults of the data plane against the coordinator as a process behind real sockets: B39, B40, B70, B78 to B82."""

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from learner.coordinator.schema import ledger_summary, open_database
from protocol import messages as m
from protocol.config import Config
from protocol.errors import PeerUnreachable
from protocol.sockets import Client, make_hello
from tests.learner.coordinator.harness import answer, make_config, rows, trained
from tests.learner.coordinator.process import free_port, start
from tests.support.wait import wait_until

RUN_S = 60.0


class Site:
    """One coordinator process, and a generator, a reward daemon and a trainer played by the test."""

    def __init__(self, folder: Path, data: list[dict[str, Any]], *roles: str, **overrides: Any) -> None:
        self.folder = folder
        (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in data))
        self.config: Config = make_config(
            folder, **{"coordinator.listen": f"tcp://127.0.0.1:{free_port()}", "run.max_updates": 1000, **overrides}
        )
        self.process: subprocess.Popen[bytes] = start(self.config, folder)
        self.clients: dict[str, Client] = {}
        self.version = self.batch = 0
        self.plans: list[m.BatchPlan] = []
        for role in roles:
            self.join(role)

    def join(self, role: str) -> None:
        attributes: dict[str, Any] = {"address": "tcp://127.0.0.1:1"} if role == "rewardd" else {}
        hello = make_hello(role, name=role, attributes=attributes)  # type: ignore[arg-type]
        client = Client(self.config.coordinator.listen, hello=hello, transport=self.config.transport)
        client.start(deadline_s=30.0)
        self.clients[role] = client

    def ask(self, role: str, body: Any, arrays: Any = None) -> Any:
        """The answer, however often the coordinator has to be asked."""
        deadline = monotonic() + RUN_S
        while True:
            try:
                return self.clients[role].request(body, arrays=arrays, deadline_s=5.0).result(timeout=6.0).body
            except (PeerUnreachable, TimeoutError):
                assert monotonic() < deadline, self.log[-3000:]

    def lease(self, max_slots: int = 16) -> list[m.Lease]:
        grant = self.ask("generator", m.LeaseRequest(max_slots=max_slots, policy_version=self.version))
        return list(grant.leases)

    def resume(self) -> None:
        self.ask("trainer", m.ResumeRequest(last_batch_id=self.batch, policy_version=self.version, num_ranks=1))

    def train(self) -> str:
        """Trains the next batch if there is one; else says what is waited for."""
        request = m.BatchRequest(after_batch_id=self.batch, policy_version=self.version, wait_s=0.3)
        plan = self.ask("trainer", request)
        if isinstance(plan, m.BatchNotReady):
            return str(plan.waiting_for)
        self.ask("trainer", trained(plan))
        self.plans.append(plan)
        self.batch, self.version = plan.batch_id, plan.policy_version + 1
        return ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert ledger_summary(self.ledger)["balanced"]
        self.process = start(self.config, self.folder)

    @property
    def ledger(self) -> Path:
        return Path(self.config.run.dir) / "coordinator" / "ledger.sqlite"

    @property
    def log(self) -> str:
        return (self.folder / "coordinator.log").read_text(errors="replace")

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        database = open_database(self.ledger, read_only=True)
        try:
            return database.execute(sql).fetchall()
        finally:
            database.close()

    def close(self) -> None:
        for client in self.clients.values():
            client.close(deadline_s=0.2)
        self.process.kill()
        self.process.wait()


@contextmanager
def site_of(folder: Path, data: list[dict[str, Any]], *roles: str, **overrides: Any) -> Iterator[Site]:
    site = Site(folder, data, *roles, **overrides)
    try:
        yield site
    finally:
        site.close()


ALL = ("generator", "rewardd", "trainer")


def test_b39_a_prompt_that_never_completes_is_retired_replaced_and_not_drawn_again(tmp_path):
    settings = {
        "coordinator.lease_deadline_s": 0.5,
        "coordinator.max_attempts": 2,
        "data.max_prompt_failures": 1,
        "run.max_passes": 3,
    }
    with site_of(tmp_path, rows(6), *ALL, **settings) as site:
        site.resume()
        cursed, is_killed = "", False
        deadline = monotonic() + RUN_S
        while site.train() != "finished":
            assert monotonic() < deadline, site.log[-3000:]
            for lease in site.lease():
                cursed = cursed or lease.prompt_id
                for slot in lease.slots if lease.prompt_id != cursed else ():
                    assert site.ask("rewardd", *answer(lease, slot)).status == "accepted"
            if len(site.plans) == 2 and not is_killed:
                is_killed = True
                site.kill()
        ended = site.query(f"SELECT state, reason FROM groups WHERE prompt_id = '{cursed}'")
        assert len(ended) == 1 and ended[0][0] == "quarantined" and "failed attempts" in ended[0][1]
        per_prompt = Counter(item.prompt_id for plan in site.plans for item in plan.items)
        assert set(per_prompt.values()) == {3 * 2} and len(per_prompt) == 5


def test_b40_a_waiting_trainer_hears_who_is_missing(tmp_path):
    with site_of(tmp_path, rows(6), "trainer") as site:
        site.resume()
        wait_until(lambda: site.train() == "generators", deadline_s=30.0, what="notice of no generators")
        site.join("generator")
        wait_until(lambda: site.train() == "reward", deadline_s=30.0, what="notice of no reward daemon")
        site.join("rewardd")
        wait_until(lambda: site.train() == "generation", deadline_s=30.0, what="waiting for answers")
        for lease in site.lease():
            for slot in lease.slots:
                site.ask("rewardd", *answer(lease, slot))
        assert site.train() == "" and site.batch == 1
        site.clients["rewardd"].close(deadline_s=0.0)
        wait_until(lambda: site.train() in ("", "reward"), deadline_s=30.0, what="notice that it has gone")


def test_b70_groups_of_a_wrong_size_never_reach_a_batch(tmp_path):
    with site_of(tmp_path, rows(12), *ALL, **{"learner.group_size": 3}) as site:
        site.resume()
        for _ in range(3):
            for lease in site.lease():
                for slot in lease.slots:
                    body, arrays = answer(lease, slot)
                    foreign = answer(lease, slot, group_id=10**6)
                    beyond = answer(lease, slot, attempt=lease.attempt)
                    assert site.ask("rewardd", *foreign).status not in ("accepted", "duplicate")
                    assert site.ask("rewardd", body, arrays).status == "accepted"
                    assert site.ask("rewardd", *beyond).status == "duplicate"
            assert site.train() == ""
        for plan in site.plans:
            sizes = Counter(item.group_id for item in plan.items)
            assert set(sizes.values()) == {3}
            assert len({(item.group_id, item.slot) for item in plan.items}) == len(plan.items)
        assert ledger_summary(site.ledger)["balanced"]


@pytest.mark.slow
def test_b78_every_prompt_of_a_pass_is_trained_once_through_kills_with_work_in_flight(tmp_path):
    """13 prompts in batches of 2, killed after every second batch with leases and answers outstanding."""
    settings = {"run.max_passes": 1, "coordinator.lease_deadline_s": 1.0}
    with site_of(tmp_path, rows(13), *ALL, **settings) as site:
        site.resume()
        kills = 0
        deadline = monotonic() + 2 * RUN_S
        while (waiting := site.train()) != "finished":
            assert monotonic() < deadline, (waiting, site.log[-3000:])
            for lease in site.lease(max_slots=5):
                for slot in lease.slots:
                    site.ask("rewardd", *answer(lease, slot, num_tokens=4 + 50 * (lease.group_id % 3 == 0)))
            if len(site.plans) >= 2 * (kills + 1) and kills < 3:
                kills += 1
                site.lease(max_slots=3)  # held by nobody who will answer
                site.kill()
        per_prompt = Counter(item.prompt_id for plan in site.plans for item in plan.items)
        assert kills == 3 and len(per_prompt) == 13 and set(per_prompt.values()) == {2}
        summary = ledger_summary(site.ledger)
        assert summary["balanced"] and summary["trained"] == 26 and summary["in_flight"] == 0


def test_b79_a_changed_file_is_refused_at_the_restart_or_begins_the_pass_anew(tmp_path):
    with site_of(tmp_path, rows(6), "generator") as site:
        assert site.lease(4)
        site.process.kill()
        site.process.wait()
        (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows(6, start=3)))
        site.process = start(site.config, tmp_path)
        assert site.process.wait(90) == 64
        assert "the training data changed since this run began" in site.log
        data = site.config.data.model_copy(update={"on_change": "restart_pass"})
        site.config = site.config.model_copy(update={"data": data})
        site.process = start(site.config, tmp_path)
        wait_until(lambda: "the pass begins anew" in site.log, deadline_s=30.0, what="the restart of the pass")
        assert site.lease(4)


def test_b80_b81_unusable_rows_are_named_at_the_start_and_never_drawn(tmp_path):
    good = rows(4)
    long = rows(1)[0] | {"prompt": [{"role": "user", "content": "x" * 500}]}
    data = [*good[:2], long, rows(1)[0] | {"prompt": ""}, rows(1)[0] | {"reward_model": {"style": "rule"}}, *good[2:]]
    settings = {"data.max_prompt_tokens": 100, "run.max_passes": 1}
    with site_of(tmp_path, data, *ALL, **settings) as site:
        site.resume()
        for row, reason in (
            (3, "tokens, over data.max_prompt_tokens = 100"),
            (4, "empty"),
            (5, "ground_truth is missing"),
        ):
            assert any(f"row={row}" in line and reason in line for line in site.log.splitlines()), site.log
        deadline = monotonic() + RUN_S
        while site.train() != "finished":
            assert monotonic() < deadline, site.log[-3000:]
            for lease in site.lease():
                for slot in lease.slots:
                    site.ask("rewardd", *answer(lease, slot))
        assert sum(len(plan.items) for plan in site.plans) == 2 * len(good)


def test_b82_overlap_with_the_evaluation_set_is_counted_and_refused(tmp_path):
    shouted = rows(1)[0] | {"prompt": [{"role": "user", "content": " TOY 0  + 1 = ?"}]}
    (tmp_path / "eval.jsonl").write_text("\n".join(json.dumps(row) for row in [shouted, *rows(3, source="other")]))
    settings = {"data.eval_files": [str(tmp_path / "eval.jsonl")]}
    with site_of(tmp_path, rows(6), **settings) as site:
        assert site.process.wait(90) == 64
        assert "1 of 4 evaluation prompts (25.0%) are in the training data" in site.log
    with site_of(tmp_path, rows(6), "trainer", **settings, **{"data.max_eval_overlap": 0.3}) as site:
        assert "evaluation prompt is in the training data" in site.log
