"""Entry point `vllm.general_plugins`: runs in every process of the engine, before the model is loaded.

It registers the weight transfer engine (by name: nothing heavy is imported) and ties the process's life to the
generator's main process, which may be killed at any moment.
"""

import ctypes
import os
import signal

import msgspec

ENVIRONMENT_KEY = "SLIPSTREAM_ENGINE_WORKER"
_PR_SET_PDEATHSIG = 1


class WorkerSetup(msgspec.Struct, frozen=True):
    """What an engine's processes are told through the environment.

    Attributes:
        main_pid: the generator's main process.
        stage_address: where weight receivers report; "" = receive no weights.
        model_path: the folder whose tensors a version consists of.
        num_tokens: ids from here on are beyond the tokenizer and must never be sampled.
        tied: the output layer shares the embedding's weights.
    """

    main_pid: int
    stage_address: str
    model_path: str
    num_tokens: int
    tied: bool


def read_setup() -> WorkerSetup | None:
    """The setup of the generator that started this process, or None in any other vLLM process."""
    text = os.environ.get(ENVIRONMENT_KEY)
    return msgspec.json.decode(text.encode(), type=WorkerSetup) if text else None


def register() -> None:
    """Called by vLLM in each of its processes; safe to call twice."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from generators.vllm_adapter import TRANSFER_BACKEND, wait_without_spinning

    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, "generators.weights.engine", "SlipstreamTransferEngine"
        )
    setup = read_setup()
    if setup is not None and os.getpid() != setup.main_pid:
        die_with_parent(main_pid=setup.main_pid)
        wait_without_spinning()


def die_with_parent(*, main_pid: int) -> None:
    """Asks the kernel to kill this process when its parent ends, and ends at once if the main process has already.

    "Parent" is the thread that started this process: the generator keeps it alive.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not os.path.exists(f"/proc/{main_pid}"):
        os._exit(1)
