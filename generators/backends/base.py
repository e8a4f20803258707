"""The interface between the generator service and whatever samples tokens.

A backend samples one answer per `sample` call and holds one policy version at a time. The service decides what to
sample and when to change the version; the backend knows nothing of leases, sockets or reward daemons.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from protocol.messages import FinishReason, SamplingParams


class EngineFailed(RuntimeError):
    """The engine is dead: the generator reports the cause and exits."""


class RequestFailed(RuntimeError):
    """One request failed and the engine goes on: the slot is handed back."""


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One answer to sample. `prompt_token_ids` includes tokens of an earlier attempt that is being continued."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Sampled tokens, exactly as the engine's sampler saw them (R tokens, the final stop token included).

    Attributes:
        token_ids: int32 [R].
        logp_behaviour: float32 [R], log-softmax(logits / temperature) of each sampled token.
        versions: int32 [R], the policy version that sampled each token.
        finish_reason: "aborted" when `abort` ended it; the tokens so far are still exact.
        stop_reason: the stop token's id or the stop string; "" otherwise.
    """

    token_ids: np.ndarray
    logp_behaviour: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    stop_reason: str

    def __post_init__(self) -> None:
        lengths = {self.token_ids.size, self.logp_behaviour.size, self.versions.size}
        if len(lengths) != 1:
            raise RequestFailed(
                f"the engine returned {self.token_ids.size} tokens, {self.logp_behaviour.size} log-probs and"
                f" {self.versions.size} versions for one answer"
            )

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.size)


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """What the publisher must know of the engine's workers to send weights to them."""

    num_workers: int
    transports: list[str]
    device: str
    device_uuids: list[str]


class Backend(Protocol):
    """A sampler with one policy version. All methods are called from one asyncio loop."""

    @property
    def policy_version(self) -> int:
        """Version of the weights in use; -1 before `start` returned."""

    @property
    def worker_info(self) -> WorkerInfo:
        """Valid after `start`."""

    async def start(self, *, stage_address: str | None) -> None:
        """Brings the engine up. Weight receivers of its workers report to `stage_address`.

        Raises:
            EngineFailed: the engine did not come up; the message names the cause.
        """

    async def sample(self, request: SampleRequest) -> Sample:
        """Samples one answer; returns once it is finished or aborted.

        Raises:
            EngineFailed: the engine died. RequestFailed: only this request failed.
        """

    async def abort(self, request_id: str) -> None:
        """Ends a request early; its `sample` returns with finish_reason "aborted". Unknown ids are ignored."""

    def progress(self) -> Mapping[str, int]:
        """Tokens sampled so far per running request id."""

    def metrics(self) -> Mapping[str, float]:
        """What only the engine knows of itself, under names of `protocol.metrics`."""

    async def load_version(self, policy_version: int) -> float:
        """Switches to a version that every worker has staged whole; requests in flight go on with it.

        Returns:
            Seconds for which no token was sampled.

        Raises:
            EngineFailed: the load failed twice, so the weights in use are unknown.
        """

    async def check_health(self) -> None:
        """Raises EngineFailed when the engine is dead."""

    def child_pids(self) -> list[int]:
        """Processes the engine runs in, beside this one."""

    async def close(self) -> None:
        """Stops the engine and its processes."""
