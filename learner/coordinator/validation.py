"""What an incoming trajectory must be to count; anything else is refused with a reason (B19, B20, B41)."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from protocol.messages import SamplingParams, Trajectory

Arrays = Mapping[str, NDArray[np.generic]]

DTYPES = {"token_ids": "<i4", "logp_behaviour": "<f4", "versions": "<i4", "loss_mask": "|u1"}


def problem_of(
    trajectory: Trajectory,
    arrays: Arrays,
    *,
    prompt_token_ids: NDArray[np.int32],
    sampling: SamplingParams,
    vocab_size: int,
    policy_version: int,
    tokenizer_hash: str | None,
) -> str | None:
    """None when the trajectory can be trained on, else "slug: what is wrong".

    `policy_version` is the newest version there is: no token can have a newer one.
    """
    num_prompt, num_response = trajectory.num_prompt_tokens, trajectory.num_response_tokens
    for name, dtype in DTYPES.items():
        expected = num_prompt + num_response if name == "token_ids" else num_response
        array = arrays.get(name)
        if array is None or array.dtype.str != dtype or array.shape != (expected,):
            found = "is absent" if array is None else f"is {array.dtype.str} {list(array.shape)}"
            return f"lengths: {name} {found}, expected {dtype} [{expected}]"
    if num_response == 0:
        return "empty: the answer has no token"
    if num_response > sampling.max_tokens:
        return f"too_long: {num_response} response tokens, the limit is {sampling.max_tokens}"
    if trajectory.finish_reason not in ("stop", "length"):
        return f"unfinished: finish_reason is {trajectory.finish_reason}"
    if trajectory.sampling != sampling:
        return f"sampling: not the lease's parameters: {_difference(trajectory.sampling, sampling)}"
    if tokenizer_hash and trajectory.tokenizer_hash and trajectory.tokenizer_hash != tokenizer_hash:
        return f"tokenizer: {trajectory.tokenizer_hash}, the run's is {tokenizer_hash}"
    return _problem_of_values(arrays, prompt_token_ids, vocab_size=vocab_size, policy_version=policy_version)


def _problem_of_values(
    arrays: Arrays, prompt_token_ids: NDArray[np.int32], *, vocab_size: int, policy_version: int
) -> str | None:
    token_ids, mask = arrays["token_ids"], arrays["loss_mask"]
    if len(token_ids) - len(mask) != len(prompt_token_ids) or not np.array_equal(
        token_ids[: len(prompt_token_ids)], prompt_token_ids
    ):
        return "prompt: its token ids are not the lease's"
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        return f"vocabulary: token id {high if high >= vocab_size else low} is outside of [0, {vocab_size})"
    if mask.max() > 1:
        return "loss_mask: holds values other than 0 and 1"
    sampled = mask != 0
    if not sampled.any():
        return "loss_mask: no token was sampled by the policy"
    logp, versions = arrays["logp_behaviour"][sampled], arrays["versions"][sampled]
    if not np.isfinite(logp).all():
        return "logp: a sampled token has no finite log-prob"
    if logp.max() > 1e-3:
        return f"logp: a log-prob is {float(logp.max()):.4g}, above 0"
    if versions[0] < 0 or versions[-1] > policy_version or (np.diff(versions) < 0).any():
        return f"versions: must ascend within 0 .. {policy_version}, got {int(versions.min())} .. {int(versions.max())}"
    return None


def count_versions(versions: NDArray[np.generic], loss_mask: NDArray[np.generic]) -> dict[int, int]:
    """Number of tokens the policy sampled, by policy version."""
    values, counts = np.unique(versions[loss_mask != 0], return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _difference(found: SamplingParams, expected: SamplingParams) -> str:
    names = [n for n in SamplingParams.__struct_fields__ if getattr(found, n) != getattr(expected, n)]
    return ", ".join(f"{n} {getattr(found, n)!r} instead of {getattr(expected, n)!r}" for n in names)
