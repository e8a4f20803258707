"""What rank 0 tells the other ranks to do next; MessagePack over the default process group."""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist

from protocol.messages import BatchPlan


class Train(msgspec.Struct, tag="train", frozen=True):
    """Train this batch."""

    plan: BatchPlan
    replayed: bool


class Wait(msgspec.Struct, tag="wait", frozen=True):
    """Nothing to do now; ranks stay in touch."""


class Save(msgspec.Struct, tag="save", frozen=True):
    """Save a checkpoint in the background."""


class Finalise(msgspec.Struct, tag="finalise", frozen=True):
    """Save a checkpoint and the Hugging Face folder, as far as asked, and wait until they are on the disk."""

    save: bool
    export: bool


class Resume(msgspec.Struct, tag="resume", frozen=True):
    """Load this checkpoint folder ("" = none)."""

    path: str


class End(msgspec.Struct, tag="end", frozen=True):
    """Leave the loop with this exit status."""

    status: int


Command = Train | Wait | Save | Finalise | Resume | End

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def broadcast_command(command: Command | None) -> Command:
    """Rank 0 gives the command, every rank gets it. Waits up to ``trainer.collective_timeout_s``."""
    if dist.get_world_size() == 1:
        assert command is not None
        return command
    raw = b"" if command is None else _encoder.encode(command)
    size = torch.tensor(len(raw), dtype=torch.int64)
    dist.broadcast(size, src=0)
    buffer = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, src=0)
    return _decoder.decode(buffer.numpy().tobytes())


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank."""
    total = torch.tensor(int(flag))
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return bool(total)
