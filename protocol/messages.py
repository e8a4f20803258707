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
    command line -> coordinator: Hello, StatusRequest, LedgerRequest, ControlRequest
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

PROTOCOL_VERSION = 1

Role = Literal["coordinator", "trainer", "rewardd", "generator", "client"]
Purpose = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "interrupted", "aborted"]
VerdictKind = Literal["correct", "partial", "wrong", "unjudged", "rejected"]
NonNegative = Annotated[int, Meta(ge=0)]


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))


class Body(Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="type", tag=_snake):
    """Base of all message bodies."""


class SamplingParams(Struct, kw_only=True, frozen=True):
    """Every sampling parameter, set explicitly and recorded with the trajectory (design.md, invariant 1).

    Units: `max_tokens` and `min_tokens` in tokens; `top_k` = -1 and `top_p` = 1.0 and `min_p` = 0.0 mean off.
    `logprobs` names the convention of the recorded behaviour log-probs: "processed" is log-softmax(logits / T).
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    logprobs: Literal["processed"] = "processed"


class RewarddAddress(Struct, kw_only=True, frozen=True):
    """A live reward daemon."""

    name: str
    address: str


# ---------------------------------------------------------------- membership


class Hello(Body, frozen=True):
    """First message on a connection. `incarnation` is fresh per process start; `attributes` holds plain facts of the
    role: a rewardd's or publisher's `address`, a generator's `num_workers`, `transports`, `host`, `device`."""

    role: Role
    name: str
    incarnation: str
    protocol_version: int
    host: str
    pid: int
    run_id: str | None = None
    tokenizer_hash: str | None = None
    attributes: dict[str, str | int | float | bool | list[str]] = {}


class Welcome(Body, frozen=True):
    """The coordinator's (or any server's) answer to an accepted hello."""

    server: str
    incarnation: str
    run_id: str
    policy_version: int
    published_version: int
    rewardd: list[RewarddAddress] = []
    weights_address: str | None = None
    run_state: str = "running"


class Refused(Body, frozen=True):
    """The answer to anything that is not accepted. `code` is a stable slug, `reason` one line for a person."""

    code: str
    reason: str


class SlotProgress(Struct, kw_only=True, frozen=True):
    """Progress of one leased slot: tokens sampled so far (monotone within an attempt)."""

    group_id: int
    slot: int
    attempt: int
    num_tokens: int


class SlotRef(Struct, kw_only=True, frozen=True):
    """One attempt at one slot of a group."""

    group_id: int
    slot: int
    attempt: int


class Heartbeat(Body, frozen=True):
    """Sent by every client each `transport.heartbeat_s`. `progress_age_s` is the age of the last work done;
    `idle_fractions` maps a cause of idleness to its share of the last minute (sums to 1 with "working")."""

    state: str
    waiting_for: str = ""
    policy_version: int = -1
    progress_age_s: float = 0.0
    progress: list[SlotProgress] = []
    idle_fractions: dict[str, float] = {}
    metrics: dict[str, float] = {}


class HeartbeatAck(Body, frozen=True):
    """`command` is "" | "drain" | "stop" (run finished or asked to stop). `cancel` lists slots moved elsewhere."""

    policy_version: int
    published_version: int
    rewardd: list[RewarddAddress] = []
    weights_address: str | None = None
    cancel: list[SlotRef] = []
    command: str = ""
    run_state: str = "running"


class Goodbye(Body, frozen=True):
    """An orderly leave: leases go back at once."""

    reason: str


class Ack(Body, frozen=True):
    """Generic positive answer; `detail` may say what was counted."""

    detail: str = ""


# ---------------------------------------------------------------- leases and trajectories


class PartialAnswer(Struct, kw_only=True, frozen=True):
    """Tokens an earlier attempt already sampled for a slot, to be continued. Its arrays travel in the envelope as
    `partial/{group_id}/{slot}/{token_ids|logp_behaviour|versions}` (response tokens only)."""

    group_id: int
    slot: int
    num_tokens: int


class Lease(Struct, kw_only=True, frozen=True):
    """Permission to answer one prompt `len(slots)` times. `deadline_s` is relative to receipt and is renewed by
    heartbeats that show progress. A generator below `min_version` must not start it."""

    group_id: int
    prompt_id: str
    attempt: int
    slots: list[int]
    prompt_token_ids: list[int]
    sampling: SamplingParams
    deadline_s: float
    min_version: int
    stage: int = 0
    purpose: Purpose = "train"
    environment: str = ""
    partial: list[PartialAnswer] = []


class LeaseRequest(Body, frozen=True):
    """Asks for up to `max_slots` slots (whole groups, except moved slots)."""

    max_slots: int
    policy_version: int


class LeaseGrant(Body, frozen=True):
    """Leases granted now; when empty, `waiting_for` says why (staleness, weights, no_prompts, finished, paused)."""

    leases: list[Lease]
    waiting_for: str = ""


class HandBack(Body, frozen=True):
    """Returns unfinished slots with the tokens sampled so far (arrays as in PartialAnswer, possibly empty).
    Answered with Ack once committed."""

    group_id: int
    attempt: int
    slots: list[int]
    partial: list[PartialAnswer] = []
    reason: str = ""


class Trajectory(Body, frozen=True):
    """One sampled answer. Arrays of the envelope (R = response tokens, P = prompt tokens):

    token_ids int32 [P + R], logp_behaviour float32 [R], versions int32 [R], loss_mask uint8 [R] (0 for tokens the
    policy did not sample, such as tool output). `response_text` is derived from the ids for scoring only.
    """

    group_id: int
    slot: int
    attempt: int
    prompt_id: str
    generator: str
    purpose: Purpose
    stage: int
    num_prompt_tokens: NonNegative
    num_response_tokens: NonNegative
    finish_reason: FinishReason
    stop_reason: str
    sampling: SamplingParams
    response_text: str
    tokenizer_hash: str
    seconds: float
    metrics: dict[str, float] = {}


class Verdict(Struct, kw_only=True, frozen=True):
    """What the reward daemon says of one trajectory (design.md, invariant 5).

    `score` is the training reward in [.., 1] and is meaningful only for correct, partial and wrong. `components`
    keeps correctness apart from format rewards and penalties. `reason` is a stable slug; `isolation` names the
    sandbox tier when code was run.
    """

    kind: VerdictKind
    score: float
    reason: str
    scorer: str
    elapsed_ms: float
    isolation: str = ""
    components: dict[str, float] = {}


class ScoredTrajectory(Body, frozen=True):
    """A trajectory and its verdict; the envelope carries the trajectory's arrays unchanged."""

    trajectory: Trajectory
    verdict: Verdict
    rewardd: str


class TrajectoryAck(Body, frozen=True):
    """End-to-end acknowledgement, sent after the coordinator committed (relayed by rewardd to the generator).

    status: accepted | duplicate | unknown (no such slot) | refused (malformed; `reason` says why). All are final.
    """

    group_id: int
    slot: int
    attempt: int
    status: Literal["accepted", "duplicate", "unknown", "refused"]
    reason: str = ""


class Busy(Body, frozen=True):
    """A receiver without credit asks the sender to retry after `retry_after_s` or at another daemon."""

    retry_after_s: float
    reason: str


class GroundTruthRequest(Body, frozen=True):
    """rewardd asks for what it needs to score these prompts (it caches the answers)."""

    prompt_ids: list[str]


class GroundTruth(Struct, kw_only=True, frozen=True):
    """What scoring one prompt needs. `payload` is JSON: {"style", "ground_truth", "extra_info"} as in the data."""

    prompt_id: str
    data_source: str
    ability: str
    payload: str


class GroundTruths(Body, frozen=True):
    """Answer to GroundTruthRequest; unknown ids are left out."""

    items: list[GroundTruth]


# ---------------------------------------------------------------- training


class ResumeRequest(Body, frozen=True):
    """A starting trainer names the newest committed checkpoint it has loaded (batch 0, version 0 = fresh)."""

    last_batch_id: int
    policy_version: int
    num_ranks: int


class ResumePlan(Body, frozen=True):
    """`attempt` numbers this trainer's lineage. `replay` lists journalled batches to train again, in order, before
    new ones; nothing is published until the version is past `published_version`."""

    attempt: int
    replay: list[int]
    published_version: int
    max_updates: int


class BatchRequest(Body, frozen=True):
    """Asks for the plan of the batch after `after_batch_id` (waits at the coordinator up to `wait_s`)."""

    after_batch_id: int
    policy_version: int
    wait_s: float


class BatchItem(Struct, kw_only=True, frozen=True):
    """One trajectory's row in the batch table; every rank gets the whole table, and arrays of its own shard only.

    `min_version`/`max_version` are over its sampled tokens. `num_tokens` = P + R.
    """

    group_id: int
    slot: int
    prompt_id: str
    data_source: str
    num_prompt_tokens: int
    num_response_tokens: int
    score: float
    verdict: VerdictKind
    finish_reason: FinishReason
    min_version: int
    max_version: int
    temperature: float
    stage: int
    components: dict[str, float] = {}


class BatchPlan(Body, frozen=True):
    """A complete batch. `micro_batches[rank]` is a list of micro-batches, each a list of indices into `items`;
    equal counts on all ranks, an empty micro-batch contributes nothing. `policy_version` is the version it trains."""

    batch_id: int
    policy_version: int
    stage: int
    items: list[BatchItem]
    micro_batches: list[list[list[int]]]
    fill_fraction: float
    oldest_age_s: float
    metrics: dict[str, float] = {}


class BatchNotReady(Body, frozen=True):
    """Nothing to train yet. `waiting_for`: generation | reward | generators | finished | stopped | paused;
    `detail` is one line for a person."""

    waiting_for: str
    detail: str = ""


class ShardRequest(Body, frozen=True):
    """A rank asks for the arrays of its micro-batches of a batch (also of a journalled one, for replay)."""

    batch_id: int
    rank: int
    num_ranks: int


class Shard(Body, frozen=True):
    """Arrays named `{index}/{token_ids|logp_behaviour|versions|loss_mask}` for each item index of the rank."""

    batch_id: int
    indices: list[int]


class BatchTrained(Body, frozen=True):
    """A batch was consumed. The version advanced to `policy_version` if `num_applied` > 0."""

    batch_id: int
    attempt: int
    policy_version: int
    num_applied: int
    num_skipped: int
    replayed: bool
    num_trained_tokens: int
    num_stale_tokens: int
    max_token_staleness: int
    metrics: dict[str, float] = {}


class CheckpointCommitted(Body, frozen=True):
    """A checkpoint's COMMITTED manifest is in place and holds everything up to `batch_id`."""

    batch_id: int
    policy_version: int
    path: str


class VersionPublished(Body, frozen=True):
    """The named generators hold this version now."""

    policy_version: int
    epoch: int
    generators: list[str]
    seconds: float


# ---------------------------------------------------------------- weights


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


# ---------------------------------------------------------------- operators


class StatusRequest(Body, frozen=True):
    """The command line asks what everything is doing."""


class RoleStatus(Struct, kw_only=True, frozen=True):
    """One role instance, as `slipstream status --json` prints it."""

    role: str
    name: str
    state: str
    since: float
    version: int
    progress_age_s: float
    waiting_for: str
    idle_fractions: dict[str, float] = {}
    metrics: dict[str, float] = {}
    pid: int = 0
    host: str = ""


class StatusReply(Body, frozen=True):
    """Everything `slipstream status` shows. `series` are recent points for live curves."""

    run_id: str
    run_name: str
    run_state: str
    policy_version: int
    published_version: int
    num_updates: int
    max_updates: int
    roles: list[RoleStatus]
    queues: dict[str, float]
    staleness_histogram: dict[str, int]
    metrics: dict[str, float]
    ledger: dict[str, int]
    alarms: list[str] = []
    series: dict[str, list[float]] = {}


class ControlRequest(Body, frozen=True):
    """stop (finish and save) | pause | resume."""

    command: Literal["stop", "pause", "resume"]
    reason: str = ""


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
