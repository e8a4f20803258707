"""vLLM's own CUDA IPC transfer engine beside ours, in the same worker: what the benchmark of weights compares with."""

from typing import Any


class NativeTransfer:
    """Mixed into vLLM's worker (`worker_extension_cls`)."""

    def use_native_transfer(self, wanted: bool) -> None:
        """Puts vLLM's own engine in the place of ours, or ours back."""
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
