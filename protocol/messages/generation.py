"""Leases, trajectories and verdicts: between generators, reward daemons and the coordinator."""

from typing import Literal

from msgspec import Struct

from protocol.messages.base import Body, FinishReason, NonNegative, Purpose, SamplingParams, VerdictKind


class PartialAnswer(Struct, kw_only=True, frozen=True):
    """Tokens an earlier attempt already sampled for a slot, to be continued. Its arrays travel in the envelope as
    `partial/{group_id}/{slot}/{token_ids|logp_behaviour|versions|loss_mask}` (response tokens only)."""

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
    keeps correctness apart from format rewards and penalties; `metrics` are the scorer's own, for the log. `reason` is
    a stable slug; `isolation` names the sandbox tier when code was run.
    """

    kind: VerdictKind
    score: float
    reason: str
    scorer: str
    elapsed_ms: float
    isolation: str = ""
    components: dict[str, float] = {}
    metrics: dict[str, float] = {}


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
    """What scoring one prompt needs. `payload` is JSON: {"style", "ground_truth", "extra_info"} as in the data, and
    "prompt", its messages."""

    prompt_id: str
    data_source: str
    ability: str
    payload: str


class GroundTruths(Body, frozen=True):
    """Answer to GroundTruthRequest; unknown ids are left out."""

    items: list[GroundTruth]
