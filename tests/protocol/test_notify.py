"""sd_notify against a real datagram socket."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.notify import Notifier


class Manager:
    """What a service manager hears."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.setblocking(False)

    def heard(self) -> list[list[str]]:
        found = []
        while True:
            try:
                found.append(self._socket.recv(4096).decode().split("\n"))
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


def test_ready_status_and_stopping_are_told(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.address})
    notifier.ready("serving\nat once")
    notifier.status("busy")
    notifier.progress()
    notifier.stopping("signal")
    assert manager.heard() == [
        ["READY=1", "WATCHDOG=1", "STATUS=serving at once"],
        ["STATUS=busy"],
        ["STOPPING=1", "STATUS=signal"],
    ]


def test_b55_keep_alives_follow_progress_and_only_so_often(manager: Manager) -> None:
    clock = [0.0]
    notifier = Notifier({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "8000000"}, now=lambda: clock[0])
    for clock[0] in (0.0, 0.1, 0.9, 1.0, 1.5, 2.5):
        notifier.progress()
    assert manager.heard() == [["WATCHDOG=1"]] * 3  # an eighth of the interval apart
    clock[0] = 100.0
    assert manager.heard() == []  # no work, no sign of life


def test_b55_a_long_operation_is_announced_and_its_time_ends_with_it(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "10000000"})
    with pytest.raises(RuntimeError), notifier.long_operation("saving", deadline_s=600.0):
        assert notifier.watchdog_s == 600.0
        raise RuntimeError
    assert manager.heard() == [
        ["WATCHDOG_USEC=600000000", "WATCHDOG=1", "STATUS=saving"],
        ["WATCHDOG_USEC=10000000", "WATCHDOG=1"],
    ]
    with notifier.long_operation("short", deadline_s=5.0):
        assert notifier.watchdog_s == 10.0
    assert manager.heard() == []


def test_children_do_not_speak_in_the_name_of_their_parent(manager: Manager) -> None:
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "1", "WATCHDOG_PID": str(os.getpid()), "A": "b"}
    assert Notifier(environment).watchdog_s == 1e-6
    assert environment == {"A": "b"}
    assert Notifier({"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}).watchdog_s == 0.0


def test_without_a_service_manager_nothing_happens_and_a_gone_one_is_survived(tmp_path: Path) -> None:
    for environment in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "1000"}):
        notifier = Notifier(environment)
        notifier.ready("x")
        notifier.progress()
        with notifier.long_operation("x", deadline_s=1.0):
            notifier.stopping("x")
        assert not (tmp_path / "gone").exists()


def test_abstract_addresses_are_understood() -> None:
    name = f"slipstream-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name)
        listener.settimeout(5)
        Notifier({"NOTIFY_SOCKET": "@" + name}).ready("x")
        assert listener.recv(100).startswith(b"READY=1")
