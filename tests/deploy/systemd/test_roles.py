"""Real role processes under a real NOTIFY_SOCKET: ready, fed by work, silent when stuck, stopping."""

import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from deploy.local.notices import NoticeSocket
from protocol.config.load import load_config
from protocol.errors import ExitStatus
from tests.learner.trainer.coordinator import ScriptedCoordinator
from tests.support.stack import free_port, running_stack, write_config
from tests.support.wait import wait_until

START_S = 120.0


class Manager:
    """Hears every process; `fields` holds what each pid has said so far."""

    def __init__(self) -> None:
        self.notices = NoticeSocket()
        self.fields: dict[int, dict[str, str]] = defaultdict(dict)
        self.feeds: dict[int, int] = defaultdict(int)

    def environment(self, watchdog_s: float) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.notices.address, "WATCHDOG_USEC": f"{watchdog_s * 1e6:.0f}"}

    def hear(self) -> None:
        for pid, fields in self.notices.read():
            self.fields[pid] |= fields
            self.feeds[pid] += "WATCHDOG" in fields

    def said(self, pid: int, key: str) -> bool:
        self.hear()
        return self.fields[pid].get(key) == "1"

    def is_fed(self, pid: int) -> bool:
        """Whether two more signs of life arrive."""
        self.hear()
        before = self.feeds[pid]
        wait_until(lambda: self.hear() or self.feeds[pid] >= before + 2, deadline_s=START_S, what="signs of life")
        return True


def test_b55_roles_are_ready_feed_the_watchdog_by_work_and_announce_their_stop(tmp_path: Path) -> None:
    manager = Manager()
    config_path = write_config(tmp_path)
    with running_stack(config_path) as stack:
        pids = {}
        for role in ("coordinator", "rewardd", "generator"):
            process = stack.start(role, **manager.environment(watchdog_s=2.0))
            pids[role] = process.pid
            wait_until(lambda pid=process.pid: manager.said(pid, "READY"), deadline_s=START_S, what=f"{role} ready")
        for pid in pids.values():
            assert manager.is_fed(pid)

        stuck = stack.processes["rewardd"]
        stuck.send_signal(signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{stuck.pid}/stat").read_text().split()[2] == "T", what="stopped")
        manager.hear()
        silent_since = manager.feeds[stuck.pid]
        assert manager.is_fed(pids["coordinator"])  # the others go on
        manager.hear()
        assert manager.feeds[stuck.pid] == silent_since
        stuck.send_signal(signal.SIGCONT)
        assert manager.is_fed(stuck.pid)

        for role in ("generator", "rewardd", "coordinator"):
            stack.processes[role].send_signal(signal.SIGTERM)
            assert stack.processes[role].wait(60) == ExitStatus.STOPPED, stack.log(role)
            assert manager.said(pids[role], "STOPPING")
    manager.notices.close()


@pytest.mark.engine
@pytest.mark.slow
def test_trainer_ranks_of_two_machines_meet_and_speak_through_one_process(tmp_path: Path) -> None:
    """Two launchers, as the units of two machines start them, on one rendezvous; each speaks for its rank."""
    port = free_port()
    config_path = write_config(
        tmp_path,
        trainer__num_nodes=2,
        trainer__master_port=port,
        trainer__batch_wait_s=0.2,
        trainer__device="cpu",
        trainer__threads_per_rank=1,
        learner__checkpoint={"every_updates": 1000, "min_free_gb": 0.0},
        data__max_prompt_tokens=64,
    )
    splits = [[[5, 0], [1, 2]], [[3, 4, 6, 7], []]]
    coordinator = ScriptedCoordinator(load_config(config_path).config, splits=splits, num_batches=2)
    manager = Manager()
    launchers: list[subprocess.Popen[bytes]] = []
    log = (tmp_path / "ranks.log").open("wb")
    try:
        for node_rank in (0, 1):
            launchers.append(start_node(config_path, node_rank, log=log, environment=manager.environment(60.0)))
        for launcher in launchers:
            wait_until(
                lambda pid=launcher.pid: manager.said(pid, "READY") or any(p.poll() is not None for p in launchers),
                deadline_s=START_S,
                what="ranks ready",
            )
        assert [launcher.wait(120) for launcher in launchers] == [0, 0], (tmp_path / "ranks.log").read_text()
        assert set(manager.fields) == {launcher.pid for launcher in launchers}
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGTERM)
                launcher.wait(60)
        coordinator.close()
        manager.notices.close()
        log.close()


def start_node(config_path: Path, node_rank: int, *, log: Any, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """`slipstream trainer` of one machine."""
    command = [sys.executable, "-m", "deploy", "trainer", "--config", str(config_path), "--node-rank", str(node_rank)]
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(command, stdout=log, stderr=log, env=own | {"OMP_NUM_THREADS": "1"} | environment)
