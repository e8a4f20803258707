"""One leased slot: what to ask the engine for, and what its tokens become on the wire. Pure."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from generators.backends.base import Sample, SampleRequest
from protocol.messages import FinishReason, HandBack, Lease, PartialAnswer, SlotProgress, Trajectory

ARRAYS = {"token_ids": np.int32, "logp_behaviour": np.float32, "versions": np.int32, "loss_mask": np.uint8}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The response tokens of a slot so far (R tokens).

    Attributes:
        token_ids: int32 [R].
        logp_behaviour: float32 [R]; 0 where an environment put the token in.
        versions: int32 [R], the policy version that sampled each token, or was in use when it was put in.
        loss_mask: uint8 [R]; 1 where the policy sampled the token, 0 where an environment put it in.
        finish_reason: of the last sample; "length" before the first.
    """

    token_ids: np.ndarray
    logp_behaviour: np.ndarray
    versions: np.ndarray
    loss_mask: np.ndarray
    finish_reason: FinishReason = "length"
    stop_reason: str = ""

    @classmethod
    def empty(cls) -> "Answer":
        return cls(**{name: np.zeros(0, dtype=dtype) for name, dtype in ARRAYS.items()})  # type: ignore[arg-type]

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.size)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by their names on the wire."""
        return {name: getattr(self, name) for name in ARRAYS}

    def sampled(self, sample: Sample) -> "Answer":
        """This answer with the policy's next tokens, which decide how it ended."""
        new = {
            "token_ids": sample.token_ids,
            "logp_behaviour": sample.logp_behaviour,
            "versions": sample.versions,
            "loss_mask": np.ones(sample.num_tokens, dtype=np.uint8),
        }
        return self._extended(new, finish_reason=sample.finish_reason, stop_reason=sample.stop_reason)

    def observed(self, token_ids: list[int], *, policy_version: int) -> "Answer":
        """This answer with tokens of an environment."""
        size = len(token_ids)
        new: dict[str, np.ndarray] = {
            "token_ids": np.asarray(token_ids, dtype=np.int32),
            "logp_behaviour": np.zeros(size, dtype=np.float32),
            "versions": np.full(size, policy_version, dtype=np.int32),
            "loss_mask": np.zeros(size, dtype=np.uint8),
        }
        return self._extended(new, finish_reason="length", stop_reason="")

    def turns(self) -> list[tuple[bool, np.ndarray]]:
        """Runs of tokens by one author, oldest first: (sampled by the policy, token ids)."""
        edges = np.flatnonzero(np.diff(self.loss_mask)) + 1
        parts = zip(np.split(self.loss_mask, edges), np.split(self.token_ids, edges), strict=True)
        return [(bool(mask[0]), ids) for mask, ids in parts if mask.size]

    def _extended(self, new: dict[str, np.ndarray], *, finish_reason: FinishReason, stop_reason: str) -> "Answer":
        joined = {name: np.concatenate([getattr(self, name), array]) for name, array in new.items()}
        return Answer(**joined, finish_reason=finish_reason, stop_reason=stop_reason)


@dataclass(eq=False)
class Slot:
    """One attempt at one slot, from grant to acknowledgement.

    Attributes:
        answer: tokens so far, those of earlier attempts included.
        num_requests: how often the engine was asked.
    """

    lease: Lease
    slot: int
    answer: Answer = field(default_factory=Answer.empty)
    started: float = field(default_factory=time.monotonic)
    num_requests: int = 0
    cancelled: bool = False

    @property
    def key(self) -> str:
        return f"{self.lease.group_id}/{self.slot}/{self.lease.attempt}"

    @property
    def request_id(self) -> str:
        """Of the newest request to the engine; each turn is a request of its own."""
        return f"{self.key}/{self.num_requests}"

    @property
    def is_full(self) -> bool:
        return self.answer.num_tokens >= self.lease.sampling.max_tokens

    def next_request(self) -> SampleRequest:
        """Asks for what is left of the answer."""
        self.num_requests += 1
        done = self.answer.num_tokens
        sampling = self.lease.sampling
        rest = msgspec.structs.replace(
            sampling, max_tokens=sampling.max_tokens - done, min_tokens=max(0, sampling.min_tokens - done)
        )
        prompt = [*self.lease.prompt_token_ids, *self.answer.token_ids.tolist()]
        return SampleRequest(request_id=self.request_id, prompt_token_ids=prompt, sampling=rest)

    def progress(self, num_new: int) -> SlotProgress:
        return SlotProgress(
            group_id=self.lease.group_id,
            slot=self.slot,
            attempt=self.lease.attempt,
            num_tokens=self.answer.num_tokens + num_new,
        )


def slots_of(lease: Lease, arrays: Mapping[str, np.ndarray]) -> list[Slot]:
    """The slots of a lease with the earlier tokens that came with it.

    Raises:
        ValueError: the arrays do not fit what the lease says.
    """
    earlier = {}
    for partial in lease.partial:
        prefix = f"partial/{partial.group_id}/{partial.slot}/"
        found = {name: arrays.get(prefix + name) for name in ARRAYS}
        if any(array is None or array.shape != (partial.num_tokens,) for array in found.values()):
            raise ValueError(f"group {lease.group_id} slot {partial.slot}: earlier tokens are not as described")
        earlier[partial.slot] = Answer(**{name: np.array(a, dtype=ARRAYS[name]) for name, a in found.items()})  # type: ignore[arg-type]
    return [Slot(lease=lease, slot=slot, answer=earlier.get(slot, Answer.empty())) for slot in lease.slots]


def trajectory_of(
    slot: Slot, *, generator: str, tokenizer_hash: str, response_text: str
) -> tuple[Trajectory, dict[str, np.ndarray]]:
    """The message and arrays of a finished answer."""
    lease, answer = slot.lease, slot.answer
    prompt = np.asarray(lease.prompt_token_ids, dtype=np.int32)
    body = Trajectory(
        group_id=lease.group_id,
        slot=slot.slot,
        attempt=lease.attempt,
        prompt_id=lease.prompt_id,
        generator=generator,
        purpose=lease.purpose,
        stage=lease.stage,
        num_prompt_tokens=prompt.size,
        num_response_tokens=answer.num_tokens,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        sampling=lease.sampling,
        response_text=response_text,
        tokenizer_hash=tokenizer_hash,
        seconds=time.monotonic() - slot.started,
    )
    return body, {**answer.arrays(), "token_ids": np.concatenate([prompt, answer.token_ids])}


def hand_back_of(slots: list[Slot], *, reason: str) -> tuple[HandBack, dict[str, np.ndarray]]:
    """The message that returns slots of one lease, with all tokens sampled so far."""
    lease = slots[0].lease
    partial, arrays = [], {}
    for slot in slots:
        answer = slot.answer
        partial.append(PartialAnswer(group_id=lease.group_id, slot=slot.slot, num_tokens=answer.num_tokens))
        for name, array in answer.arrays().items():
            arrays[f"partial/{lease.group_id}/{slot.slot}/{name}"] = array
    body = HandBack(
        group_id=lease.group_id,
        attempt=lease.attempt,
        slots=[slot.slot for slot in slots],
        partial=partial,
        reason=reason,
    )
    return body, arrays
