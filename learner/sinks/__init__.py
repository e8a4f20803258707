"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, trackio, and sinks of other packages."""

from learner.sinks.base import MetricSink, SinkContext, SinkRecord

__all__ = ["MetricSink", "SinkContext", "SinkRecord"]
