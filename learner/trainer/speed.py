"""How fast an update was: tokens a second and model FLOPs utilisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from learner.algorithms.mfu import model_flops_utilisation
from learner.packing import model_shape
from protocol.config import Config
from protocol.messages import BatchItem


class SpeedMeter:
    """Metrics of the updates of one model on some devices.

    ``perf/throughput`` is tokens (prompts and answers) per second and device, ``perf/mfu/actor`` counts one forward and
    one backward pass of the policy whatever was run beside them (``learner.algorithms.mfu``); it is absent on devices
    whose peak is not known.
    """

    def __init__(self, config: Config, *, num_ranks: int, device: torch.device) -> None:
        self._shape = model_shape(config.model.path)
        self._num_ranks = num_ranks
        self._device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"

    def metrics(self, items: Sequence[BatchItem], *, seconds: float) -> dict[str, float]:
        """Of an update over these sequences that took `seconds`."""
        seconds = max(seconds, 1e-9)
        lengths = [item.num_prompt_tokens + item.num_response_tokens for item in items]
        metrics = {
            "perf/update_seconds": seconds,
            "perf/learner_tokens_per_second": sum(lengths) / seconds,
            "perf/throughput": sum(lengths) / seconds / self._num_ranks,
        }
        if self._shape is not None:
            share = model_flops_utilisation(
                lengths,
                shape=self._shape,
                seconds=seconds,
                num_devices=self._num_ranks,
                device_name=self._device_name,
            )
            if share is not None:
                metrics["perf/mfu/actor"] = share
        return metrics
