"""The offer of the trial update: version 0, read from the model's own folder by the "file" path."""

from pathlib import Path

import torch

from generators.weights.link_messages import TRIAL_EPOCH
from learner.weights.buckets import plan_buckets
from learner.weights.snapshot import Snapshot
from protocol.messages import WeightOffer


def trial_offer(folder: str, *, bucket_bytes: int, deadline_s: float) -> WeightOffer | None:
    """Describes the folder's tensors as an offer; None when it holds no safetensors (random weights)."""
    from safetensors.torch import load_file

    tensors: list[tuple[str, torch.Tensor]] = []
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors.extend(load_file(path).items())
    if not tensors:
        return None
    specs = Snapshot(policy_version=0, tensors=tensors).specs()
    return WeightOffer(
        epoch=TRIAL_EPOCH,
        policy_version=0,
        tensors=specs,
        buckets=plan_buckets(specs, bucket_bytes=bucket_bytes),
        deadline_s=deadline_s,
        path=folder,
    )
