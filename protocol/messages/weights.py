"""The weight group: between the trainer's publisher and generators."""

from typing import Literal

from msgspec import Struct

from protocol.messages.base import Body


class TensorSpec(Struct, kw_only=True, frozen=True):
    """One tensor of a version: name as in the Hugging Face checkpoint, torch dtype name, shape, checksum (64-bit,
    as defined in `protocol.checksum`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int


class WeightJoin(Body, frozen=True):
    """A generator offers to receive weights: one weight-group rank per engine worker."""

    num_workers: int
    transports: list[str]
    policy_version: int
    node: str
    device_uuids: list[str] = []


class WeightGroup(Body, frozen=True):
    """Membership of a new epoch. The receiver's workers are ranks first_rank .. first_rank + num_workers - 1 of a
    process group of `world_size` whose rank 0 is the publisher; the store listens at store_host:store_port."""

    epoch: int
    transport: str
    store_host: str
    store_port: int
    first_rank: int
    world_size: int
    deadline_s: float


class WeightOffer(Body, frozen=True):
    """A version is about to be sent in this epoch: tensors in sending order, packed into `buckets` (lists of
    indices into `tensors`). For transport "file", `path` names the folder."""

    epoch: int
    policy_version: int
    tensors: list[TensorSpec]
    buckets: list[list[int]]
    deadline_s: float
    path: str = ""


class WeightStatus(Body, frozen=True):
    """A generator's report: joined | staged | committed | failed, with the reason for failed."""

    epoch: int
    policy_version: int
    phase: Literal["joined", "staged", "committed", "failed"]
    reason: str = ""
    seconds: float = 0.0
    pause_seconds: float = 0.0
