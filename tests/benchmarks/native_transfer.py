"""vLLM's own CUDA IPC transfer engine beside ours, in the same worker: what the benchmark of weights compares with."""

import importlib.util
import sys
import types
from typing import Any


class NativeTransfer:
    """Mixed into vLLM's worker (`worker_extension_cls`)."""

    def use_native_transfer(self, wanted: bool) -> None:
        """Puts vLLM's own engine in the place of ours, or ours back."""
        if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
            sys.modules.setdefault("ray", types.ModuleType("ray"))  # imported by vLLM's module, used only to send
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        worker: Any = self
        if wanted:
            ours = worker.weight_transfer_engine
            worker.our_transfer_engine = ours
            worker.weight_transfer_engine = IPCWeightTransferEngine(
                ours.config, ours.vllm_config, ours.device, ours.model
            )
        else:
            worker.weight_transfer_engine = worker.our_transfer_engine
