"""State of the random generators the trainer draws from (torch, CPU and GPU), per rank."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_rng(*, device: torch.device) -> dict[str, torch.Tensor]:
    """All ranks take part; every rank gets all ranks' states as uint8 tensors named ``rng/<kind>/<rank>``."""
    own = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    states: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(states, own)
    return {f"rng/{kind}/{rank}": state for rank, part in enumerate(states) for kind, state in part.items()}


def restore_rng(read: dict[str, torch.Tensor], *, rank: int, device: torch.device) -> None:
    """Restores this rank's states; a rank that did not exist at the save keeps its own seed."""
    if (state := read.get(f"rng/cpu/{rank}")) is not None:
        torch.set_rng_state(state)
    if device.type == "cuda" and (state := read.get(f"rng/cuda/{rank}")) is not None:
        torch.cuda.set_rng_state(state, device)
