"""Scorers of a package installed for the test only, so that its faults happen inside real worker processes."""

import os
from pathlib import Path

import pytest

MODULE = '''
import os, signal, time
from rewardd.scorers import Canary, Outcome, Task, encode_truth


class Obedient:
    """Does what the response says."""
    name, lane, deadline_s, pure = "obedient", "math", 0.5, False

    def __init__(self, section):
        pass

    def score(self, task):
        word = task.response
        if word == "spin":
            for number in range(1, 65):
                if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
                    signal.signal(number, signal.SIG_IGN)
            while True:
                pass
        if word == "slow":
            begin = time.process_time()
            while time.process_time() - begin < 0.2:
                pass
        if word == "sleep":
            time.sleep(60)
        if word == "exit":
            os._exit(3)
        if word == "raise":
            raise RuntimeError("broken inside")
        if word == "unusable":
            raise ValueError("no such truth")
        if word == "pid":
            return Outcome(kind="correct", reason=str(os.getpid()), value=1.0)
        return Outcome(kind="correct", reason=word, value=1.0)

    def canaries(self):
        return []


class Liar(Obedient):
    name = "liar"

    def canaries(self):
        return [Canary(task=Task(scorer="liar", response="x", truth=encode_truth("x")), kind="wrong")]
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offers the scorers `obedient` and `liar` through the entry point group."""
    folder = tmp_path / "plugin"
    info = folder / "obedient_scorers-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "obedient_scorers.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: obedient-scorers\nVersion: 1.0\n")
    points = "[slipstream.scorers]\nobedient = obedient_scorers:Obedient\nliar = obedient_scorers:Liar\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
