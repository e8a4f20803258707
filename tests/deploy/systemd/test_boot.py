"""The rendered units under a real systemd: booted in a container of this machine's own files, roles killed there.

Runs where SLIPSTREAM_TEST_SYSTEMD=1 asks for it: it needs root, systemd-nspawn and half a minute.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.cli import run
from tests.support.roles import ROOT
from tests.support.stack import write_config
from tests.support.wait import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def why_not() -> str:
    if os.environ.get("SLIPSTREAM_TEST_SYSTEMD") != "1":
        return "set SLIPSTREAM_TEST_SYSTEMD=1 to boot a systemd"
    if os.geteuid() != 0 or shutil.which("systemd-nspawn") is None:
        return "needs root and systemd-nspawn (Debian: apt-get install systemd-container)"
    return ""


class Container:
    """A booted systemd over an overlay of /."""

    def __init__(self, folder: Path, *, binds: list[Path]) -> None:
        self._upper, self._root = folder / "upper", folder / "root"
        self._upper.mkdir(parents=True)
        self._root.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", self._upper], check=True)
        for name in ("files", "work"):
            (self._upper / name).mkdir()
        layers = f"lowerdir=/,upperdir={self._upper}/files,workdir={self._upper}/work"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, self._root], check=True)
        self.units = self._root / "etc/systemd/system"
        (self._root / "etc/machine-id").write_text("5" * 32 + "\n")
        command = ["systemd-nspawn", f"--directory={self._root}", "--boot", "--register=no", "--keep-unit"]
        command += ["--console=read-only", "--capability=all", *(f"--bind={path}" for path in binds)]
        self._log = (folder / "boot.log").open("wb")
        self._command = [*command, "systemd.unit=basic.target", "systemd.mask=systemd-resolved.service"]

    def boot(self) -> None:
        environment = os.environ | {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log, env=environment)
        parent = psutil.Process(self._process.pid)
        wait_until(lambda: parent.children(), deadline_s=60, what="pid 1 of the container")
        self._init = parent.children()[0].pid
        wait_until(lambda: self("systemctl", "is-system-running") == "running", deadline_s=120, what="boot")

    def __call__(self, *command: str) -> str:
        enter = ["nsenter", "-t", str(self._init), "-a", *command]
        return subprocess.run(enter, capture_output=True, text=True).stdout.strip()

    def show(self, unit: str, key: str) -> str:
        return self("systemctl", "show", "--value", "-p", key, unit)

    def is_active(self, unit: str) -> bool:
        return self.show(unit, "ActiveState") == "active"

    def seconds_to_return(self, unit: str, *, after: int) -> float:
        """Send a signal to a role's process and wait until another one is ready."""
        pid, start = self.show(unit, "MainPID"), time.monotonic()
        self("kill", f"-{after}", pid)
        wait_until(
            lambda: self.show(unit, "MainPID") not in (pid, "0") and self.is_active(unit),
            deadline_s=120,
            what=f"{unit} back",
        )
        return time.monotonic() - start

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        for mount in (self._root, self._upper):
            subprocess.run(["umount", "--lazy", mount], check=False)


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "stack").mkdir()
    made = Container(tmp_path / "container", binds=[tmp_path / "stack", ROOT, Path(sys.prefix)])
    yield made
    made.close()


def test_b54_b55_roles_killed_frozen_and_stopped_under_systemd(container: Container, tmp_path: Path) -> None:
    config = write_config(tmp_path / "stack", data__max_prompt_tokens=64, run__name="boot", run__max_updates=100_000)
    units = ["units", "--config", str(config), "--out", str(container.units), "--no-private-tmp"]
    units += ["--roles", "coordinator,rewardd,generator", "--env", f"PYTHONPATH={ROOT}", "deploy.watchdog_s=20"]
    assert run(units) == 0
    container.boot()
    container("systemctl", "start", "slipstream-boot.target")
    names = ["coordinator", "rewardd@0", "generator@0"]
    for name in names:
        unit = f"slipstream-boot-{name}"
        wait_until(lambda unit=unit: container.is_active(unit), deadline_s=120, what=f"{unit} active")
    for name in names:
        seconds = container.seconds_to_return(f"slipstream-boot-{name}", after=signal.SIGKILL)
        print(f"{name}: ready again {seconds:.1f} s after kill -9")
    frozen = container.seconds_to_return("slipstream-boot-coordinator", after=signal.SIGSTOP)
    print(f"coordinator: ready again {frozen:.1f} s after it froze (watchdog 20 s)")
    container.seconds_to_return("slipstream-boot-generator@0", after=signal.SIGTERM)
    journal = container("journalctl", "--no-pager", "-o", "cat", "-u", "slipstream-boot-coordinator")
    assert "Watchdog timeout" in journal and "Fatal Python error: Aborted" in journal
    assert int(container.show("slipstream-boot-coordinator", "NRestarts")) >= 2

    container("systemctl", "stop", "slipstream-boot.target")
    for name in names:
        unit = f"slipstream-boot-{name}"
        wait_until(lambda unit=unit: container.show(unit, "ActiveState") == "inactive", deadline_s=60, what="stopped")
        assert container.show(unit, "Result") == "success"
