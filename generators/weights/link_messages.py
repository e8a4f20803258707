"""What passes between a generator's main process and the weight receivers in its engine's worker processes.

Both ends are on one machine and of one run: a ZeroMQ socket in a private folder. Commands reuse the publisher's own
messages; `WeightGroup.first_rank` is then the worker's own rank.
"""

import msgspec
from msgspec import Struct

from protocol.messages import WeightGroup, WeightOffer, WeightStatus

TRIAL_EPOCH = -1
"""Epoch of the generator's own trial update; no publisher uses it."""


class WorkerReady(Struct, frozen=True, tag=True):
    """First message of a worker's receiver."""

    worker: int
    pid: int
    device: str
    device_uuid: str


class WorkerStatus(Struct, frozen=True, tag=True):
    """A worker's share of a `WeightStatus` (joined, staged or failed)."""

    worker: int
    status: WeightStatus


Report = WorkerReady | WorkerStatus
report_encoder = msgspec.msgpack.Encoder()
report_decoder = msgspec.msgpack.Decoder(Report)


class Command(Struct, frozen=True):
    """One command to a worker."""

    body: WeightGroup | WeightOffer


command_encoder = msgspec.msgpack.Encoder()
command_decoder = msgspec.msgpack.Decoder(Command)
