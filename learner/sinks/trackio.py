"""trackio: a local-first tracker (SQLite under its own cache folder, TRACKIO_DIR; or a Space)."""

from typing import Any

from learner.sinks.base import SinkContext, SinkRecord


class TrackioSink:
    """Options are arguments of `trackio.init` (project, space_id)."""

    requires = ("trackio",)

    def __init__(self, context: SinkContext) -> None:
        import trackio

        defaults = {"project": "slipstream", "name": f"{context.run_name}-{context.run_id}", "resume": "allow"}
        arguments: dict[str, Any] = {**defaults, "config": dict(context.config), **context.options}
        self._run = trackio.init(**arguments)

    def write(self, record: SinkRecord) -> None:
        """Logs all values at the policy version."""
        self._run.log(dict(record.values), step=record.policy_version)

    def close(self) -> None:
        """Writes what is left."""
        self._run.finish()
