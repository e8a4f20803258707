"""One leased slot: what to ask the engine for, and what its tokens become on the wire. Pure."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from generators.backends.base import Sample, SampleRequest
from protocol.messages import HandBack, Lease, PartialAnswer, SlotProgress, Trajectory

PARTIAL_ARRAYS = {"token_ids": np.int32, "logp_behaviour": np.float32, "versions": np.int32}


@dataclass(eq=False)
class Slot:
    """One attempt at one slot, from grant to acknowledgement.

    Attributes:
        earlier: tokens of earlier attempts, which this one continues.
        sample: what this generator sampled after them; None while it runs.
    """

    lease: Lease
    slot: int
    earlier: Sample
    started: float = field(default_factory=time.monotonic)
    sample: Sample | None = None
    cancelled: bool = False

    @property
    def key(self) -> tuple[int, int, int]:
        return self.lease.group_id, self.slot, self.lease.attempt

    @property
    def request_id(self) -> str:
        return "/".join(map(str, self.key))

    def request(self) -> SampleRequest | None:
        """What is left to sample; None when the earlier tokens already fill the answer."""
        done = self.earlier.num_tokens
        sampling = self.lease.sampling
        if done >= sampling.max_tokens:
            return None
        rest = msgspec.structs.replace(
            sampling, max_tokens=sampling.max_tokens - done, min_tokens=max(0, sampling.min_tokens - done)
        )
        prompt = [*self.lease.prompt_token_ids, *self.earlier.token_ids.tolist()]
        return SampleRequest(request_id=self.request_id, prompt_token_ids=prompt, sampling=rest)

    def progress(self, num_new: int) -> SlotProgress:
        return SlotProgress(
            group_id=self.lease.group_id,
            slot=self.slot,
            attempt=self.lease.attempt,
            num_tokens=self.earlier.num_tokens + num_new,
        )

    def answer(self) -> Sample:
        """Earlier and new tokens as one."""
        return self.earlier if self.sample is None else join(self.earlier, self.sample)


def empty_sample() -> Sample:
    """No tokens yet."""
    arrays = {name: np.zeros(0, dtype=dtype) for name, dtype in PARTIAL_ARRAYS.items()}
    return Sample(**arrays, finish_reason="length", stop_reason="")  # type: ignore[arg-type]


def join(first: Sample, second: Sample) -> Sample:
    """Tokens, log-probs and versions one after the other; the second one's ending."""
    return replace(
        second,
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        logp_behaviour=np.concatenate([first.logp_behaviour, second.logp_behaviour]),
        versions=np.concatenate([first.versions, second.versions]),
    )


def slots_of(lease: Lease, arrays: Mapping[str, np.ndarray]) -> list[Slot]:
    """The slots of a lease with the earlier tokens that came with it.

    Raises:
        ValueError: the arrays do not fit what the lease says.
    """
    earlier = {}
    for partial in lease.partial:
        prefix = f"partial/{partial.group_id}/{partial.slot}/"
        found = {name: arrays.get(prefix + name) for name in PARTIAL_ARRAYS}
        if any(array is None or array.shape != (partial.num_tokens,) for array in found.values()):
            raise ValueError(f"group {lease.group_id} slot {partial.slot}: earlier tokens are not as described")
        copies = {name: np.array(array, dtype=PARTIAL_ARRAYS[name]) for name, array in found.items()}
        earlier[partial.slot] = Sample(**copies, finish_reason="length", stop_reason="")  # type: ignore[arg-type]
    return [Slot(lease=lease, slot=slot, earlier=earlier.get(slot, empty_sample())) for slot in lease.slots]


def trajectory_of(
    slot: Slot, *, generator: str, tokenizer_hash: str, response_text: str
) -> tuple[Trajectory, dict[str, np.ndarray]]:
    """The message and arrays of a finished answer."""
    lease, answer = slot.lease, slot.answer()
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
    return body, {
        "token_ids": np.concatenate([prompt, answer.token_ids]),
        "logp_behaviour": answer.logp_behaviour,
        "versions": answer.versions,
        "loss_mask": np.ones(answer.num_tokens, dtype=np.uint8),
    }


def hand_back_of(slots: list[Slot], *, reason: str) -> tuple[HandBack, dict[str, np.ndarray]]:
    """The message that returns slots of one lease, with all tokens sampled so far."""
    lease = slots[0].lease
    partial, arrays = [], {}
    for slot in slots:
        answer = slot.answer()
        partial.append(PartialAnswer(group_id=lease.group_id, slot=slot.slot, num_tokens=answer.num_tokens))
        for name in PARTIAL_ARRAYS:
            arrays[f"partial/{lease.group_id}/{slot.slot}/{name}"] = getattr(answer, name)
    body = HandBack(
        group_id=lease.group_id,
        attempt=lease.attempt,
        slots=[slot.slot for slot in slots],
        partial=partial,
        reason=reason,
    )
    return body, arrays
