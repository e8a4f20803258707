"""Whether a trajectory that came over the wire holds together."""

from collections.abc import Mapping

import numpy as np

from protocol.messages import Trajectory

DTYPES = {"token_ids": np.int32, "logp_behaviour": np.float32, "versions": np.int32, "loss_mask": np.uint8}


def problem_of(trajectory: Trajectory, arrays: Mapping[str, np.ndarray]) -> str:
    """What is wrong, or "".

    An answer that was aborted or interrupted is no finished one and is never scored; sampled tokens (loss_mask 1) need
    finite log-probs not above 0 and a policy version. Arrays beyond the four known ones are passed on untouched.
    """
    if trajectory.finish_reason not in ("stop", "length"):
        return f"finish reason {trajectory.finish_reason}: only a finished answer is scored"
    num_response = trajectory.num_response_tokens
    for name, dtype in DTYPES.items():
        array = arrays.get(name)
        if array is None:
            return f"array {name} is missing"
        expected = num_response + (trajectory.num_prompt_tokens if name == "token_ids" else 0)
        if array.dtype != dtype or array.shape != (expected,):
            return f"{name} is {array.dtype}{list(array.shape)}, expected {np.dtype(dtype)}[{expected}]"
    if num_response == 0:
        return "no response tokens"
    mask = arrays["loss_mask"]
    if mask.max() > 1:
        return "loss_mask holds values other than 0 and 1"
    logp = arrays["logp_behaviour"]
    # Sums and maxima instead of per-token masks: NaN and infinities survive both.
    if not np.isfinite(np.dot(logp, mask)) and not np.isfinite(logp[mask != 0]).all():
        return "logp_behaviour of a sampled token is not finite"
    if logp.max() > 1e-3 and (logp[mask != 0] > 1e-3).any():
        return "logp_behaviour of a sampled token is above 0"
    if arrays["versions"].min() < 0 and (arrays["versions"][mask != 0] < 0).any():
        return "a sampled token has no policy version"
    return "" if arrays["token_ids"].min() >= 0 else "token_ids holds a negative id"
