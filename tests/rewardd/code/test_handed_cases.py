"""Every handed code case, with what it demands of the host around it."""

import contextlib
import importlib.util
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rewardd.code import Limits, Sandbox, extract_program, run_case

CASES = [json.loads(line) for line in (Path(__file__).parent / "code_cases.jsonl").read_text().splitlines()]
# Where a case holds only with namespaces, a weaker tier has to name itself instead.
STRONGEST = "namespaces"


@contextlib.contextmanager
def host(case: dict[str, Any]) -> Iterator[None]:
    """The environment and the listeners that the case tries to reach."""
    with contextlib.ExitStack() as stack:
        for name, value in case.get("harness_env", {}).items():
            os.environ[name] = value
            stack.callback(os.environ.pop, name)
        listeners = case.get("host_listener", {})
        if "tcp" in listeners:
            stack.enter_context(socket.create_server(("127.0.0.1", listeners["tcp"])))
        if "udp_echo" in listeners:
            stack.enter_context(udp_echo(listeners["udp_echo"]))
        if "unix_abstract" in listeners:
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind("\0" + listeners["unix_abstract"])
            server.listen()
        yield


@contextlib.contextmanager
def udp_echo(port: int) -> Iterator[None]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", port))
        server.settimeout(0.1)
        ended = threading.Event()

        def echo() -> None:
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    data, peer = server.recvfrom(2048)
                    server.sendto(data, peer)

        thread = threading.Thread(target=echo)
        thread.start()
        yield
        ended.set()
        thread.join()


class PeakWatcher(threading.Thread):
    """Largest resident size of everything below the fork servers while a case runs."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__()
        self.peak_mb = 0.0
        self.ended = threading.Event()
        self._pids = pids

    def run(self) -> None:
        while not self.ended.wait(0.05):
            total = 0
            for pid in self._pids:
                with contextlib.suppress(psutil.Error):
                    for child in psutil.Process(pid).children(recursive=True):
                        with contextlib.suppress(psutil.Error):
                            total += child.memory_info().rss
            self.peak_mb = max(self.peak_mb, total / 2**20)


def leftovers(sandbox: Sandbox) -> list[psutil.Process]:
    return [child for pid in sandbox.probe()["slot_pids"] for child in psutil.Process(pid).children(recursive=True)]


def test_extraction_of_every_case() -> None:
    for case in CASES:
        if case["program"] is not None:
            assert (extract_program(case["response"]) or "").strip() == case["program"].strip(), case["id"]


@pytest.mark.parametrize("case", CASES, ids=[f"{case['id']}-{case['category']}" for case in CASES])
def test_handed_case(sandbox: Sandbox, case: dict[str, Any]) -> None:
    for package in case.get("requires", []):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"case needs the package {package}")
    limits = Limits(time_limit_s=case["time_limit_s"], memory_mb=case["memory_mb"])
    must = case.get("must", [])
    rss_before = psutil.Process().memory_info().rss
    watcher = PeakWatcher(sandbox.probe()["slot_pids"])
    if "peak_rss_mb_max" in case:
        watcher.start()
    with host(case):
        began = time.monotonic()
        result = run_case(
            sandbox,
            kind=case["kind"],
            response=case["response"],
            tests=case["tests"],
            limits=limits,
            early_exit="expected_rate" not in case,
        )
        wall = time.monotonic() - began
    if "peak_rss_mb_max" in case:
        watcher.ended.set()
        watcher.join()
        assert watcher.peak_mb <= case["peak_rss_mb_max"]

    assert result.tier == sandbox.tier
    if "isolation" in case and STRONGEST not in result.tier:
        pytest.skip(f"isolation case on tier {result.tier}, which names itself")
    verdict = "pass" if result.reason == "passed" else result.reason
    assert verdict in case["acceptable_verdicts"], f"{case['why']}: {result}"
    assert result.passed == case["expected_pass"]
    if "expected_rate" in case:
        assert result.pass_rate == pytest.approx(case["expected_rate"])
    if "max_wall_s" in case:
        assert wall <= case["max_wall_s"]
    if "daemon_rss_growth_mb_max" in case:
        assert (psutil.Process().memory_info().rss - rss_before) / 2**20 <= case["daemon_rss_growth_mb_max"]
    for path in case.get("absent_paths", []):
        assert not os.path.lexists(path)
    if must:
        assert set(must) <= {"no_survivors", "no_zombies"}
        assert leftovers(sandbox) == []
