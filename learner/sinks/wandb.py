"""Weights & Biases; with no network, `mode: offline` and later `wandb sync`."""

from learner.sinks.base import SinkContext, SinkRecord


class WandbSink:
    """One W&B run per run id, continued after restarts. Options are arguments of `wandb.init` (project, mode, ...)."""

    requires = ("wandb",)

    def __init__(self, context: SinkContext) -> None:
        import wandb

        defaults = {"project": "slipstream", "name": context.run_name, "id": context.run_id, "resume": "allow"}
        arguments = {**defaults, "dir": str(context.folder), "config": dict(context.config), **context.options}
        self._run = wandb.init(**arguments)
        self._run.define_metric("policy_version")
        self._run.define_metric("*", step_metric="policy_version")

    def write(self, record: SinkRecord) -> None:
        """Logs all values; the axis is the policy version, as W&B's own step may not go back."""
        self._run.log({**record.values, "policy_version": record.policy_version, "time": record.time})

    def close(self) -> None:
        """Uploads what is left."""
        self._run.finish()
