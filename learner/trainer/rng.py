"""State of the random generators the trainer draws from (torch, CPU and GPU), per rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


def gather_rng(*, device: torch.device) -> dict[str, torch.Tensor]:
    """All ranks take part; every rank gets all ranks' states as uint8 tensors named ``rng/<kind>/<rank>``."""
    own = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    gathered: dict[str, torch.Tensor] = {}
    for kind, state in own.items():
        states = [torch.empty_like(state) for _ in range(dist.get_world_size())]
        dist.all_gather(states, state)
        gathered |= {f"rng/{kind}/{rank}": other for rank, other in enumerate(states)}
    return gathered


def restore_rng(read: Callable[[str], torch.Tensor], *, rank: int, device: torch.device) -> None:
    """Restores this rank's states; a kind that was not saved keeps its seed."""
    setters: dict[str, Callable[[torch.Tensor], None]] = {"cpu": torch.set_rng_state}
    if device.type == "cuda":
        setters["cuda"] = lambda state: torch.cuda.set_rng_state(state, device)
    for kind, put in setters.items():
        try:
            state = read(f"rng/{kind}/{rank}")
        except KeyError:
            continue
        put(state)
