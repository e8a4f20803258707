"""Publisher and receivers in real processes over real sockets and Gloo: faults of the weight group."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from learner.weights import publisher as publisher_module
from learner.weights.buckets import BucketLayout
from learner.weights.publisher import Publisher
from learner.weights.snapshot import Snapshot
from protocol.config import Config
from protocol.messages import VersionPublished
from tests.generators.support import make_config
from tests.support.tiny_model import build_tiny_model
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Config:
    engine_args = {"pause_s": 0.01}
    made = make_config(str(model), run_dir=str(tmp_path), backend="scripted", engine_args=engine_args)
    weights = made.weights.model_copy(update={"bucket_mb": 1})
    return made.model_copy(update={"weights": weights})


class Process:
    """One receiving process and what it printed."""

    def __init__(self, config: Config, name: str, address: str, *, send_itself: int = 0) -> None:
        environment = {**os.environ, "SLIPSTREAM_TEST_SIGNAL": str(send_itself), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.generators.receiving", config.model_dump_json(), name, address, "hash"]
        self.lines: list[str] = []
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(line.strip())

    def has(self, version: int) -> bool:
        return f"version {version}" in self.lines


@pytest.fixture
def start(config: Config) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def run(name: str, address: str, **options: Any) -> Process:
        started.append(Process(config, name, address, **options))
        return started[-1]

    yield run
    for process in started:
        process.popen.kill()
        process.popen.wait()


class Published:
    """A publisher and what it reported."""

    def __init__(self, config: Config) -> None:
        self.reports: list[VersionPublished] = []
        self.publisher = Publisher(config, tokenizer_hash="hash", on_published=self.reports.append)

    def members(self) -> list[str]:
        return self.publisher.status()["members"]


@pytest.fixture
def published(config: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[Published]:
    small_buckets(monkeypatch)
    running = Published(config)
    yield running
    running.publisher.close()


def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets even for the tiny model, so that faults can hit between two of them."""
    plan = publisher_module.plan_buckets
    monkeypatch.setattr(
        publisher_module, "plan_buckets", lambda specs, *, bucket_bytes: plan(specs, bucket_bytes=40_000)
    )


def snapshot(model: Path, version: int, *, dtype: torch.dtype | None = None) -> Snapshot:
    generator = torch.Generator().manual_seed(version)
    tensors = load_file(model / "model.safetensors")
    changed = {name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
    return Snapshot(policy_version=version, tensors=[(n, t.to(dtype or t.dtype)) for n, t in changed.items()])


def test_b49_versions_reach_all_members_and_a_late_joiner_gets_the_newest(
    published: Published, start: Callable[..., Process], model: Path
) -> None:
    publisher = published.publisher
    first = [start("g0", publisher.address), start("g1", publisher.address)]
    wait_until(lambda: published.members() == ["g0", "g1"], what="two members")
    for version in (1, 2):
        publisher.submit(snapshot(model, version))
        assert publisher.wait_idle(20.0)
        wait_until(lambda: all(process.has(version) for process in first), what=f"version {version}")  # noqa: B023
    assert publisher.status()["epoch"] == 1
    late = start("g2", publisher.address)
    wait_until(lambda: late.has(2), what="the newcomer's version")
    assert [report.generators for report in published.reports] == [["g0", "g1"], ["g0", "g1"], ["g2"]]
    first[0].popen.send_signal(signal.SIGTERM)
    wait_until(lambda: published.members() == ["g1", "g2"], what="the leave")
    publisher.submit(snapshot(model, 3))
    wait_until(lambda: first[1].has(3) and late.has(3), what="version 3 without the one that left")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_b44_receiver_lost_mid_broadcast_frees_the_others_within_the_deadline(
    published: Published, start: Callable[..., Process], model: Path, config: Config, number: int
) -> None:
    publisher = published.publisher
    good = start("g0", publisher.address)
    lost = start("g1", publisher.address, send_itself=number)
    wait_until(lambda: published.members() == ["g0", "g1"], what="two members")
    began = time.monotonic()
    publisher.submit(snapshot(model, 1))
    wait_until(lambda: good.has(1), deadline_s=4 * config.weights.deadline_s, what="version 1 at the other")
    assert time.monotonic() - began < 3 * config.weights.deadline_s
    assert not lost.has(1)
    state = Path(f"/proc/{lost.popen.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    assert state == ("T" if number == signal.SIGSTOP else "Z"), "the fault did not happen"
    publisher.submit(snapshot(model, 2))
    wait_until(lambda: good.has(2), what="the next version")
    if number == signal.SIGSTOP:
        lost.popen.send_signal(signal.SIGCONT)
        wait_until(lambda: lost.has(2), deadline_s=30.0, what="the thawed one's version")


def test_b45_wrong_bytes_are_refused_and_the_old_version_stays(
    published: Published, start: Callable[..., Process], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = published.publisher
    process = start("g0", publisher.address)
    wait_until(lambda: published.members() == ["g0"], what="a member")
    from learner.weights import rounds

    pack = rounds.pack

    def swapped(layout: BucketLayout, tensors: Any, out: torch.Tensor) -> torch.Tensor:
        """Same bytes in another order: totals agree, places do not."""
        buffer = pack(layout, tensors, out)
        return buffer.copy_(buffer.clone().flip(0))

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "pack", swapped)
        publisher.submit(snapshot(model, 1))
        assert publisher.wait_idle(20.0)
    assert "arrived with other bytes" in publisher.status()["given_up"]["g0"]
    assert not process.has(1) and not published.reports
    publisher.submit(snapshot(model, 2))
    wait_until(lambda: process.has(2), what="the next version")


def test_b46_foreign_shape_or_type_is_refused_by_name(
    published: Published, start: Callable[..., Process], model: Path
) -> None:
    publisher = published.publisher
    process = start("g0", publisher.address)
    wait_until(lambda: published.members() == ["g0"], what="a member")
    wrong = snapshot(model, 1)
    wrong.tensors[0] = (wrong.tensors[0][0], torch.zeros(wrong.tensors[0][1].shape, dtype=torch.int32))
    publisher.submit(wrong)
    assert publisher.wait_idle(20.0)
    assert "has type int32, not float32" in publisher.status()["given_up"]["g0"]
    short = snapshot(model, 2)
    missing, _ = short.tensors.pop()
    publisher.submit(short)
    assert publisher.wait_idle(20.0)
    assert f"{missing} missing" in publisher.status()["given_up"]["g0"]
    publisher.submit(snapshot(model, 3, dtype=torch.bfloat16))
    wait_until(lambda: process.has(3), what="a version in another floating type")


def test_b43_generators_follow_a_restarted_publisher_at_the_same_address(
    config: Config, start: Callable[..., Process], model: Path
) -> None:
    first = Published(config)
    address = first.publisher.address
    process = start("g0", address)
    wait_until(lambda: first.members() == ["g0"], what="a member")
    first.publisher.submit(snapshot(model, 1))
    wait_until(lambda: process.has(1), what="version 1")
    first.publisher.close()
    weights = config.weights.model_copy(update={"listen": address})
    second = Published(config.model_copy(update={"weights": weights}))
    try:
        wait_until(lambda: second.members() == ["g0"], what="the member again")
        second.publisher.submit(snapshot(model, 4))
        wait_until(lambda: process.has(4), what="version 4")
        assert second.members() == ["g0"]
    finally:
        second.publisher.close()


def test_b53_file_transport_brings_whole_versions_and_keeps_two(
    config: Config, start: Callable[..., Process], model: Path, tmp_path: Path
) -> None:
    weights = config.weights.model_copy(update={"transport": "file"})
    running = Published(config.model_copy(update={"weights": weights}))
    try:
        process = start("g0", running.publisher.address)
        wait_until(lambda: running.members() == ["g0"], what="a member")
        for version in (1, 2, 3):
            running.publisher.submit(snapshot(model, version))
            wait_until(lambda: process.has(version), what=f"version {version}")  # noqa: B023
        kept = sorted(path.name[:16] for path in (tmp_path / "weights").iterdir())
        assert kept == ["version_00000002", "version_00000003"]
    finally:
        running.publisher.close()


def test_newer_snapshot_replaces_one_that_was_not_begun(published: Published, model: Path) -> None:
    publisher = published.publisher
    for version in range(1, 6):
        publisher.submit(snapshot(model, version))
    assert publisher.wait_idle(10.0)
    assert publisher.status()["policy_version"] == 5 and not published.reports


def test_b48_a_restarted_generator_serves_only_what_it_loaded_again(
    published: Published, start: Callable[..., Process], model: Path
) -> None:
    publisher = published.publisher
    first = start("g0", publisher.address)
    wait_until(lambda: published.members() == ["g0"], what="a member")
    publisher.submit(snapshot(model, 7))
    wait_until(lambda: first.has(7), what="version 7")
    first.popen.kill()
    first.popen.wait()
    again = start("g0", publisher.address)
    wait_until(lambda: again.has(7), what="version 7 once more")
    assert again.lines[0] == "version 0", "the version of the folder's weights, until others were loaded"
    assert [report.generators for report in published.reports] == [["g0"], ["g0"]]


def test_b51_a_frozen_straggler_is_named_and_versions_go_on_reaching_the_rest(
    published: Published, start: Callable[..., Process], model: Path, config: Config
) -> None:
    publisher = published.publisher
    quick, slow = start("g0", publisher.address), start("g1", publisher.address)
    wait_until(lambda: published.members() == ["g0", "g1"], what="two members")
    publisher.submit(snapshot(model, 1))
    wait_until(lambda: quick.has(1) and slow.has(1), what="version 1")
    slow.popen.send_signal(signal.SIGSTOP)
    for version in (2, 3, 4):
        publisher.submit(snapshot(model, version))
        wait_until(lambda: quick.has(version), deadline_s=4 * config.weights.deadline_s, what=f"version {version}")  # noqa: B023
    status = publisher.status()
    assert status["holders"] == ["g0"], status
    slow.popen.send_signal(signal.SIGCONT)
    wait_until(lambda: slow.has(4), deadline_s=30.0, what="the newest version at the thawed one")
    assert not slow.has(2) and not slow.has(3)
