"""Metric sinks: whatever one of them does, giving it a record takes no time and the others get theirs."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli import run
from learner.sinks import SinkContext, SinkRecord, load
from learner.sinks.outlet import Outlet
from protocol.config.load import build_config
from protocol.errors import ExitStatus
from protocol.metrics import unregistered
from tests.support.wait import wait_until

RECORD = SinkRecord(policy_version=1, time=0.0, values={"actor/entropy": 0.5})
TRAINED: dict[str, Any] = {"time": 5.0, "batch_id": 3, "policy_version": 3, "attempt": 1, "replayed": False}


def context(folder: Path) -> SinkContext:
    return SinkContext(run_name="run", run_id="id", folder=folder, config={}, options={})


def said(caplog: pytest.LogCaptureFixture, message: str) -> list[str]:
    """The fields of each event with this message, as text."""
    return [str(getattr(record, "fields", "")) for record in caplog.records if record.getMessage() == message]


class Recorder:
    """Keeps what it gets; waits for `gate` first, and raises while `broken`."""

    def __init__(self) -> None:
        self.got: list[SinkRecord] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False
        self.closed = False

    def write(self, record: SinkRecord) -> None:
        self.gate.wait(30.0)
        if self.broken:
            raise ConnectionError("no\nroute")
        self.got.append(record)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Outlet]]:
    made: list[Outlet] = []

    def make(factory: Any, **options: Any) -> Outlet:
        made.append(Outlet("s", factory, context(tmp_path), **({"queue_records": 10} | options)))
        return made[-1]

    yield make
    for outlet in made:
        outlet.close(deadline_s=10.0)


def test_records_arrive_in_order_and_the_sink_is_closed(start: Callable[..., Outlet]) -> None:
    sink = Recorder()
    outlet = start(lambda _: sink)
    for version in range(5):
        outlet.offer(SinkRecord(version, 0.0, {}))
    outlet.close(deadline_s=10.0)
    assert [record.policy_version for record in sink.got] == list(range(5)) and sink.closed
    assert (outlet.num_written, outlet.num_dropped) == (5, 0)


def test_a_blocking_sink_drops_counts_says_so_once_and_is_left_behind(
    start: Callable[..., Outlet], caplog: pytest.LogCaptureFixture
) -> None:
    sink = Recorder()
    sink.gate.clear()
    outlet = start(lambda _: sink)
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            outlet.offer(RECORD)
        assert outlet.num_dropped >= 1000 - 11
        (trouble,) = said(caplog, "metric sink in trouble")
        assert "sinks.queue_records" in trouble
        outlet.close(deadline_s=0.05)
    assert len(said(caplog, "metric sink left behind")) == 1
    sink.gate.set()


def test_a_raising_sink_loses_only_its_own_records_and_recovers(
    start: Callable[..., Outlet], caplog: pytest.LogCaptureFixture
) -> None:
    sink = Recorder()
    sink.broken = True
    outlet = start(lambda _: sink)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            outlet.offer(RECORD)
        wait_until(lambda: outlet.num_failed == 3)
        sink.broken = False
        outlet.offer(RECORD)
        outlet.close(deadline_s=10.0)
    assert len(sink.got) == 1 and outlet.num_dropped == 3
    (trouble,) = said(caplog, "metric sink in trouble")
    assert "ConnectionError: no route" in trouble and "'lost': 3" in said(caplog, "metric sink lost records")[0]


def test_a_sink_that_cannot_be_made_is_tried_again_and_gets_what_waited(start: Callable[..., Outlet]) -> None:
    sink, tries = Recorder(), []

    def factory(context: SinkContext) -> Recorder:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("not yet")
        return sink

    outlet = start(factory, first_retry_s=0.01)
    outlet.offer(RECORD)
    wait_until(lambda: len(sink.got) == 1)
    assert len(tries) == 3 and outlet.num_dropped == 0


def test_an_end_does_not_wait_for_a_sink_that_cannot_be_made(start: Callable[..., Outlet]) -> None:
    def factory(context: SinkContext) -> Recorder:
        raise OSError("never")

    outlet = start(factory, first_retry_s=3600.0)
    outlet.offer(RECORD)
    outlet.close(deadline_s=30.0)
    assert not outlet._thread.is_alive()


def config(folder: Path, **sinks: Any) -> Any:
    values = {
        "run": {"dir": str(folder)},
        "model": {"path": str(folder)},
        "data": {"train_files": ["x"]},
        "sinks": sinks,
    }
    return build_config(values).config


def test_lines_of_metrics_and_evaluations_reach_tensorboard(tmp_path: Path) -> None:
    sinks = load.Sinks(config(tmp_path, names=["tensorboard"]), run_id="id")
    sinks.trained(TRAINED | {"actor/entropy": 0.25, "actor/loss": float("nan")})
    evaluation = {"time": 6.0, "policy_version": 3, "kind": "avg@k", "k": 4, "mean": 0.5, "standard_error": None}
    sinks.evaluated(evaluation | {"by_source": {"toy": 0.5}})
    sinks.close()
    assert sinks.metrics() == {"sinks/tensorboard/written": 2.0, "sinks/tensorboard/dropped": 0.0}
    assert not unregistered(sinks.metrics())
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (path,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    tags = {v.tag: e.step for e in EventFileLoader(str(path)).Load() for v in e.summary.value}
    assert tags == dict.fromkeys(["attempt", "actor/entropy", "eval/avg@4", "eval/avg@4/toy"], 3)


def test_wandb_and_trackio_get_the_values_by_policy_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Against stand-ins with the calls of wandb 0.31 and trackio 0.43 (neither is a dependency)."""
    calls: list[Any] = []

    class Run:
        def log(self, values: dict[str, float], step: int | None = None) -> None:
            calls.append((values, step))

        def define_metric(self, *names: str, step_metric: str | None = None) -> None:
            calls.append(names)

        def finish(self) -> None:
            calls.append("finished")

    for name in ("wandb", "trackio"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text(
            "made = []\ndef init(**options):\n    made.append(options)\n    return run\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    import trackio
    import wandb

    wandb.run = trackio.run = Run()  # type: ignore[attr-defined]
    options = {"wandb": {"project": "maths", "mode": "offline"}}
    for name in ("wandb", "trackio"):
        sinks = load.Sinks(config(tmp_path, names=[name], options=options if name == "wandb" else {}), run_id="id7")
        sinks.trained(TRAINED | {"actor/entropy": 0.25})
        sinks.close()
    (made,) = wandb.made  # type: ignore[attr-defined]
    assert (made["project"], made["mode"], made["id"], made["resume"]) == ("maths", "offline", "id7", "allow")
    logged = [call for call in calls if isinstance(call, tuple) and isinstance(call[0], dict)]
    assert logged[0][0]["actor/entropy"] == 0.25 and logged[0][0]["policy_version"] == 3
    assert logged[1] == ({"attempt": 1.0, "actor/entropy": 0.25}, 3)
    assert calls.count("finished") == 2


def test_a_missing_package_is_one_clear_line_at_check_and_no_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    path = tmp_path / "run.yaml"
    values = {"run": {"dir": str(tmp_path)}, "model": {"path": "m"}, "data": {"train_files": ["x"]}}
    path.write_text(yaml.safe_dump(values | {"sinks": {"names": ["wandb", "nonsense"]}}))
    assert run(["check", "--config", str(path)]) == ExitStatus.CONFIG
    lines = [line for line in capsys.readouterr().out.splitlines() if "sinks.names" in line]
    assert len(lines) == 2 and "pip install wandb" in lines[0]
    assert lines[1].endswith("nonsense; there are " + ", ".join(sorted(load.BUILT_IN)))
    with caplog.at_level(logging.WARNING):
        sinks = load.Sinks(config(tmp_path, names=["wandb"]), run_id="id")
    sinks.trained(TRAINED)
    sinks.close()
    assert sinks.metrics() == {} and len(said(caplog, "metric sink left out")) == 1


def test_options_of_a_sink_that_is_not_named_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    values = {"run": {"dir": str(tmp_path)}, "model": {"path": "m"}, "data": {"train_files": ["x"]}}
    path.write_text(json.dumps(values | {"sinks": {"options": {"wandb": {"project": "p"}}}}))
    assert run(["check", "--config", str(path)]) == ExitStatus.CONFIG
    assert "sinks.options.wandb: sinks.names does not name wandb" in capsys.readouterr().out
