"""Every message that crosses a process boundary, as typed MessagePack structs.

A message is an `Envelope` (one MessagePack header frame) followed by raw little-endian array frames, which the
envelope describes by name, dtype and shape (see `protocol.framing`). Bodies form one tagged union; the tag is the
class name in snake case under the key "type", so any MessagePack library can read them.

Who speaks to whom:

    generator  -> coordinator: Hello, Heartbeat, LeaseRequest, HandBack, Goodbye
    generator  -> rewardd:     Hello, Trajectory
    rewardd    -> coordinator: Hello, Heartbeat, GroundTruthRequest, ScoredTrajectory, Goodbye
    trainer    -> coordinator: Hello, Heartbeat, ResumeRequest, BatchRequest, ShardRequest, BatchTrained,
                               CheckpointCommitted, VersionPublished, Goodbye
    generator <-> publisher:   Hello, Heartbeat, WeightJoin, WeightGroup, WeightOffer, WeightStatus
    command line -> coordinator: Hello, StatusRequest, ControlRequest
"""

from protocol.messages.base import (
    PROTOCOL_VERSION,
    Body,
    FinishReason,
    NonNegative,
    Purpose,
    RewarddAddress,
    Role,
    SamplingParams,
    VerdictKind,
)
from protocol.messages.envelope import AnyBody, ArraySpec, Envelope
from protocol.messages.generation import (
    Busy,
    GroundTruth,
    GroundTruthRequest,
    GroundTruths,
    HandBack,
    Lease,
    LeaseGrant,
    LeaseRequest,
    PartialAnswer,
    ScoredTrajectory,
    Trajectory,
    TrajectoryAck,
    Verdict,
)
from protocol.messages.membership import (
    Ack,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Refused,
    SlotProgress,
    SlotRef,
    Welcome,
)
from protocol.messages.operators import Advice, ControlRequest, RoleStatus, StatusReply, StatusRequest
from protocol.messages.training import (
    BatchItem,
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
from protocol.messages.weights import TensorSpec, WeightGroup, WeightJoin, WeightOffer, WeightStatus

__all__ = [
    "PROTOCOL_VERSION",
    "Ack",
    "Advice",
    "AnyBody",
    "ArraySpec",
    "BatchItem",
    "BatchNotReady",
    "BatchPlan",
    "BatchRequest",
    "BatchTrained",
    "Body",
    "Busy",
    "CheckpointCommitted",
    "ControlRequest",
    "Envelope",
    "FinishReason",
    "Goodbye",
    "GroundTruth",
    "GroundTruthRequest",
    "GroundTruths",
    "HandBack",
    "Heartbeat",
    "HeartbeatAck",
    "Hello",
    "Lease",
    "LeaseGrant",
    "LeaseRequest",
    "NonNegative",
    "PartialAnswer",
    "Purpose",
    "Refused",
    "ResumePlan",
    "ResumeRequest",
    "RewarddAddress",
    "Role",
    "RoleStatus",
    "SamplingParams",
    "ScoredTrajectory",
    "Shard",
    "ShardRequest",
    "SlotProgress",
    "SlotRef",
    "StatusReply",
    "StatusRequest",
    "TensorSpec",
    "Trajectory",
    "TrajectoryAck",
    "Verdict",
    "VerdictKind",
    "VersionPublished",
    "WeightGroup",
    "WeightJoin",
    "WeightOffer",
    "WeightStatus",
    "Welcome",
]
