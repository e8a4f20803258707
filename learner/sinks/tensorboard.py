"""TensorBoard event files in RUN/tensorboard."""

from learner.sinks.base import SinkContext, SinkRecord


class TensorBoardSink:
    """Every value is a scalar by policy version. Option: `flush_s` (default 10)."""

    requires = ("tensorboard",)

    def __init__(self, context: SinkContext) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = context.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder), flush_secs=float(context.options.get("flush_s", 10)))

    def write(self, record: SinkRecord) -> None:
        """Adds one event with all values."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in record.values.items()]
        summary = Summary(value=values)
        self._writer.add_event(Event(wall_time=record.time, step=record.policy_version, summary=summary))

    def close(self) -> None:
        """Flushes."""
        self._writer.close()
