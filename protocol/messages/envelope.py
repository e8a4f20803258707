"""The header frame and the union of all bodies."""

from msgspec import Struct

from protocol.messages.generation import (
    Busy,
    GroundTruthRequest,
    GroundTruths,
    HandBack,
    LeaseGrant,
    LeaseRequest,
    ScoredTrajectory,
    Trajectory,
    TrajectoryAck,
)
from protocol.messages.membership import Ack, Goodbye, Heartbeat, HeartbeatAck, Hello, Refused, Welcome
from protocol.messages.operators import ControlRequest, StatusReply, StatusRequest
from protocol.messages.training import (
    BatchNotReady,
    BatchPlan,
    BatchRequest,
    BatchTrained,
    CheckpointCommitted,
    ResumePlan,
    ResumeRequest,
    Shard,
    ShardRequest,
    VersionPublished,
)
from protocol.messages.weights import WeightGroup, WeightJoin, WeightOffer, WeightStatus

AnyBody = (
    Hello
    | Welcome
    | Refused
    | Heartbeat
    | HeartbeatAck
    | Goodbye
    | Ack
    | LeaseRequest
    | LeaseGrant
    | HandBack
    | Trajectory
    | ScoredTrajectory
    | TrajectoryAck
    | Busy
    | GroundTruthRequest
    | GroundTruths
    | ResumeRequest
    | ResumePlan
    | BatchRequest
    | BatchPlan
    | BatchNotReady
    | ShardRequest
    | Shard
    | BatchTrained
    | CheckpointCommitted
    | VersionPublished
    | WeightJoin
    | WeightGroup
    | WeightOffer
    | WeightStatus
    | StatusRequest
    | StatusReply
    | ControlRequest
)


class ArraySpec(Struct, array_like=True, frozen=True):
    """Describes one raw array frame: name, numpy dtype string (little endian), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Envelope(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The header frame: `msg_id` counts per sender, `reply_to` is the msg_id this answers."""

    body: AnyBody
    msg_id: int
    reply_to: int | None = None
    arrays: list[ArraySpec] = []
