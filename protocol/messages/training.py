"""Batches, shards, checkpoints and published versions: between trainer and coordinator."""

from msgspec import Struct

from protocol.messages.base import Body, FinishReason, VerdictKind


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
    equal counts on all ranks, an empty micro-batch contributes nothing. `policy_version` is the version it trains.
    While a collapse alarm is on, `protected_batch_id` is the last batch before it (-1: none): the newest checkpoint up
    to it is kept."""

    batch_id: int
    policy_version: int
    stage: int
    items: list[BatchItem]
    micro_batches: list[list[list[int]]]
    fill_fraction: float
    oldest_age_s: float
    metrics: dict[str, float] = {}
    protected_batch_id: int = -1


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
    """A batch was consumed. The version advanced to `policy_version` if `num_applied` > 0. `trained_ages` counts the
    tokens that counted in the loss by age (versions behind the one trained); `max_token_staleness` is the age of the
    oldest token of the batch, trained or not."""

    batch_id: int
    attempt: int
    policy_version: int
    num_applied: int
    num_skipped: int
    replayed: bool
    num_trained_tokens: int
    num_stale_tokens: int
    max_token_staleness: int
    trained_ages: dict[int, int] = {}
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
