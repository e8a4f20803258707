"""TensorBoard event files from a run's records."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_events(folder: Path, *, metrics: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> int:
    """Write every number of the records as a scalar by policy version; returns how many were written.

    Raises:
        ImportError: tensorboard is not installed.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    writer = EventFileWriter(str(folder))
    points = [(r, name, r[name]) for r in metrics for name in r if "/" in name]
    points += [(r, f"eval/{_kind(r)}", r["mean"]) for r in evaluations]
    written = 0
    try:
        for record, name, value in points:
            if isinstance(value, int | float):
                summary = Summary(value=[Summary.Value(tag=name, simple_value=float(value))])
                step = int(record["policy_version"])
                writer.add_event(Event(wall_time=float(record["time"]), step=step, summary=summary))
                written += 1
    finally:
        writer.close()
    return written


def _kind(record: dict[str, Any]) -> str:
    return f"avg@{record['k']}" if record["kind"] == "avg@k" else str(record["kind"])
