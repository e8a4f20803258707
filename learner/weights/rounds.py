"""The heavy half of a round: packing and sending a snapshot, in a thread of its own."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch

from learner.weights.buckets import BucketLayout, bucket_layout, pack
from learner.weights.snapshot import Snapshot
from learner.weights.transports import Communicator, TransportFailed


def send_snapshot(
    communicator: Communicator, snapshot: Snapshot, buckets: list[list[int]], *, deadline_s: float
) -> float:
    """Sends all buckets; packs the next one while one is under way. Returns the seconds it took.

    Raises:
        TransportFailed: a receiver is gone or too slow.
    """
    started = time.monotonic()
    layouts = [bucket_layout(snapshot.specs(), bucket) for bucket in buckets]
    size = max((layout.num_bytes for layout in layouts), default=0)
    buffers = [torch.empty(size, dtype=torch.uint8, device=communicator.device) for _ in range(2)]

    def packed(layout: BucketLayout, turn: int) -> torch.Tensor:
        with snapshot.reading():
            filled = pack(layout, snapshot.tensors, buffers[turn % 2])
            if filled.device.type == "cuda":
                torch.cuda.current_stream(filled.device).synchronize()
        return filled

    try:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-packer") as packer:
            ahead = [packer.submit(packed, layout, turn) for turn, layout in enumerate(layouts[:1])]
            for turn in range(len(layouts)):
                buffer = ahead.pop().result()
                if turn + 1 < len(layouts):
                    ahead.append(packer.submit(packed, layouts[turn + 1], turn + 1))
                if time.monotonic() > started + deadline_s:
                    raise TransportFailed(f"sending took longer than {deadline_s:g} s")
                with snapshot.reading():
                    communicator.broadcast(buffer, deadline=started + deadline_s)
    finally:
        _free(buffers)
    return time.monotonic() - started


def _free(buffers: list[torch.Tensor]) -> None:
    """Gives device memory back at once: after a failure, the exception's frames would keep it until a collection."""
    for buffer in buffers:
        if buffer.device.type == "cuda":
            buffer.untyped_storage().resize_(0)
