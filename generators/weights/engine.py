"""The worker side of weight updates: a vLLM `WeightTransferEngine` that loads from the stage and receives nothing.

All receiving happens earlier, in the background (`generators.weights.receiver`), because an error between vLLM's
start_weight_update and finish_weight_update leaves a model that cannot run. Here both are empty, and one
`update_weights` call loads a version that is already proved whole; a failed load is repeated once from the same stage.
On GPUs the first load of a plain model also makes a plan (`generators.weights.inplace`) by which later ones only copy.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from generators.vllm_adapter import forget_packed_experts, mask_vocabulary, refresh_heads, reload_functions
from generators.weights.coverage import checkpoint_tensors
from generators.weights.inplace import CopyPlan, Layout, is_simple, layout_of, prove_plan
from generators.weights.plugin import read_setup
from generators.weights.receiver import Receiver

log = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: the receiver learns its group from the publisher."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which staged version to load."""

    policy_version: int


class SlipstreamTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Owns the worker's receiver and loads what it staged."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        setup = read_setup()
        self._receiver: Receiver | None = None
        self._plan: CopyPlan | None = None
        self._tried: set[Layout] = set()
        self._may_plan = device.type == "cuda" and is_simple(model)
        if setup is None:
            return
        mask_vocabulary(model, setup.num_tokens)
        if setup.stage_address:
            self._receiver = Receiver(
                setup.stage_address,
                worker=vllm_config.parallel_config.rank,
                device=_indexed(device),
                expected=checkpoint_tensors(setup.model_path),
                tied=setup.tied,
            )
            self._receiver.start()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do: the receiver joins its groups by itself."""

    def start_weight_update(self) -> None:
        """Nothing to do: the model is touched only within `receive_weights`."""

    def finish_weight_update(self) -> None:
        """Nothing to do: `receive_weights` leaves a whole model."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads a staged version and waits until it is in place."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads the staged version into the model, in checkpoint format.

        Raises:
            RuntimeError: loading failed twice; the weights in use are unknown.
        """
        assert self._receiver is not None, "this engine was started without a weight receiver"
        tensors = self._receiver.staged(update_info.policy_version)
        try:
            self._load(tensors)
        except Exception:
            log.exception("loading version %d failed; loading it again", update_info.policy_version)
            self._finalize()
            self._load(tensors)

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        if self._plan is not None and self._plan.fits(tensors):
            self._plan.load(tensors)
            return
        self._load_layerwise(tensors)
        if self._may_plan and layout_of(tensors) not in self._tried:
            self._tried.add(layout_of(tensors))
            model: Any = self.model
            self._plan = prove_plan(self.model, tensors, model.load_weights)
            log.info("in-place loading of weights: %s", "ready" if self._plan else "not possible for this model")
            if self._plan is None:
                self._load_layerwise(tensors)

    def _load_layerwise(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        if self.device.type == "cpu":
            forget_packed_experts(self.model)
        initialize, _ = reload_functions()
        initialize(self.model)
        model: Any = self.model
        loaded = model.load_weights(_on_device(tensors, self.device))
        self._finalize()
        missing = _missing(self.model, loaded)
        if missing:
            raise RuntimeError(f"{len(missing)} parameters were not loaded, such as {missing[0]}")

    def _finalize(self) -> None:
        _, finalize = reload_functions()
        finalize(self.model, self.model_config)
        refresh_heads(self.model)

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Part of the base class up to vLLM 0.26.

        Raises:
            NotImplementedError: always; `learner.weights.publisher` sends.
        """
        raise NotImplementedError("weights are sent by learner.weights.publisher")


def _on_device(tensors: list[tuple[str, torch.Tensor]], device: torch.device) -> Iterable[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        yield name, tensor.to(device, non_blocking=True)


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _missing(model: torch.nn.Module, loaded: set[str] | None) -> list[str]:
    """Parameters that no offered tensor went to (vLLM's loaders return the names they filled)."""
    if loaded is None:
        return []
    own = {name for name, _ in model.named_parameters()}
    tied = {name for name in own if name.endswith("lm_head.weight")}
    return sorted(own - set(loaded) - tied)
