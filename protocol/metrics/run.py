"""Metrics of the run as the coordinator sees it: batches, ledger, queues, rates; and the fields of its records."""

from protocol.metrics.base import Family, Metric

ROLLOUT = (
    Metric(
        "rollout/reward_mean",
        "reward",
        "Mean score of the batch's answers",
        "rising",
        "flat at 0 or 1: data and verifier do not fit, or the task is too hard or too easy",
    ),
    Metric(
        "rollout/reward_std", "reward", "Standard deviation of the scores", "above 0", "as rollout/equal_reward_groups"
    ),
    Metric("rollout/correct_fraction", "share", "Answers judged correct", "rising", "as rollout/reward_mean"),
    Metric(
        "rollout/equal_reward_groups",
        "share",
        "Groups whose answers all have one score: they teach nothing",
        "below 0.5",
        "algorithm.filter_groups = equal_rewards, a larger learner.group_size, or other prompts",
    ),
    Metric(
        "rollout/response_tokens_mean",
        "tokens",
        "Mean length of the answers",
        "no jumps",
        "as rollout/truncated_fraction",
    ),
    Metric("rollout/response_tokens_max", "tokens", "Longest answer", "", ""),
    Metric(
        "rollout/truncated_fraction",
        "share",
        "Answers cut at the token limit",
        "below 0.1",
        "raise sampling.max_response_tokens, or algorithm.overlong = soft_penalty",
    ),
    Metric(
        "rollout/component/<component>", "reward", "Mean of a part of the reward, or of what a scorer measures", "", ""
    ),
    Metric(
        "staleness/token_mean",
        "versions",
        "Mean age of the batch's tokens, before training",
        "below algorithm.max_staleness",
        "fewer generators when it is at the bound all the time",
    ),
    Metric(
        "staleness/token_max",
        "versions",
        "Age of the batch's oldest token",
        "at most algorithm.max_staleness + 1",
        "as staleness/masked_share",
    ),
    Metric(
        "staleness/old_token_fraction", "share", "Tokens beyond the bound", "below 0.02", "as staleness/masked_share"
    ),
)

COUNTERS = (
    Metric("trained_tokens", "tokens", "Tokens trained", "growing", "see idle/trainer", counter=True),
    Metric(
        "stale_tokens",
        "tokens",
        "Sampled tokens beyond the bound: in no loss",
        "below 2 % of trained_tokens",
        "as staleness/masked_share",
        counter=True,
    ),
    Metric(
        "skipped_updates",
        "batches",
        "Batches of which no step was applied",
        "0",
        "lower learner.optim.lr",
        counter=True,
    ),
    Metric("issued", "slots", "Slots (answers wanted) issued", "growing", "", counter=True),
    Metric(
        "reissued",
        "slots",
        "Further attempts at slots",
        "below 5 % of issued",
        "look at failed_attempts by reason",
        counter=True,
    ),
    Metric(
        "failed_attempts/<reason>",
        "slots",
        "Attempts that ended without an answer that counts",
        "near 0",
        "the reason: expired (generator died or stalls), unjudged (rewardd), and so on",
        counter=True,
    ),
    Metric(
        "moved_slots",
        "slots",
        "Slots moved from a slow generator to another",
        "near 0",
        "one generator is much slower than its fellows",
        counter=True,
    ),
    Metric("skipped_solved", "prompts", "Prompts passed over as solved often enough", "", "", counter=True),
    Metric(
        "trajectories/<status>",
        "answers",
        "Answers that arrived, by what became of them",
        "accepted",
        "refused: see refused by reason; duplicate: transport.ack_deadline_s may be too short",
        counter=True,
    ),
    Metric(
        "refused/<reason>",
        "messages",
        "Answers and messages refused",
        "0",
        "roles of different versions, tokenizers or runs; the coordinator's log names the sender",
        counter=True,
    ),
    Metric(
        "verdicts/<verdict>",
        "answers",
        "Answers by verdict",
        "unjudged and rejected near 0",
        "unjudged: rewardd's log; rejected: malformed answers or unusable ground truth",
        counter=True,
    ),
    Metric(
        "abandoned_<what>",
        "batches, groups or answers",
        "Given up, or trained again, after a resume from an earlier checkpoint",
        "0",
        "learner.checkpoint.every_updates",
        counter=True,
    ),
)

FLEET = (
    Metric(
        "time_share/<roles>/<cause>",
        "share",
        "Time of trainer, generators or reward daemons by cause, mean since the batch before; sums to 1 for each",
        "mostly working",
        "docs/tuning.md",
    ),
    Metric("fleet/generators", "processes", "Live generators", "as wanted", "slipstream status"),
    Metric("fleet/reward_daemons", "processes", "Live reward daemons", "as wanted", "slipstream status"),
    Metric(
        "fleet/slots_used",
        "share",
        "Answers being sampled over the slots of all generators",
        "above 0.7",
        "docs/tuning.md",
    ),
    Metric("fleet/kv_demand", "share", "Largest generator/kv_demand", "0.4 to 1", "as generator/kv_demand"),
    Metric(
        "fleet/reward_queue_depth",
        "answers",
        "Largest rewardd/queue_depth",
        "below rewardd.max_queue / 2",
        "slipstream scale rewardd=K",
    ),
    Metric(
        "fleet/reward_queue_oldest_s",
        "s",
        "Largest rewardd/queue_oldest_s",
        "below transport.ack_deadline_s / 2",
        "slipstream scale rewardd=K",
    ),
)

EVALUATION = (
    Metric(
        "eval/<kind>",
        "reward",
        "Mean over held-out prompts: greedy, or avg@k (to sinks and TensorBoard; eval.jsonl)",
        "rising",
        "falling while rollout/reward_mean rises: the policy learns the training prompts by heart",
    ),
    Metric("eval/<kind>/standard_error", "reward", "Standard error of the mean over prompts", "", ""),
    Metric("eval/<kind>/<source>", "reward", "Mean over the prompts of a data source", "rising", "as eval by kind"),
)

STATUS = (
    Metric(
        "generated_tokens_per_s",
        "tokens/s",
        "Tokens in answers that arrived in the last minute",
        "stable",
        "see idle/generators",
    ),
    Metric(
        "idle/trainer",
        "share",
        "Time of the last minute in which the trainer did not train",
        "below 0.3",
        "slipstream scale generators=K; see docs/tuning.md",
    ),
    Metric(
        "idle/generators",
        "share",
        "Time of the last minute in which generators did not sample",
        "below 0.3",
        "fewer generators, or a larger algorithm.max_staleness",
    ),
    Metric(
        "idle/reward",
        "share",
        "Time of the last minute in which reward daemons had nothing to score",
        "above 0.2",
        "near 0: raise rewardd.math.num_workers or rewardd.code.num_workers, or slipstream scale rewardd=K",
    ),
    Metric("policy_version", "versions", "Version that the trainer has reached", "growing", ""),
    Metric(
        "published_version",
        "versions",
        "Version that generators were given",
        "at most 1 behind policy_version",
        "the log of the trainer and of the generators: weight transfers fail",
    ),
    Metric("updates", "batches", "Batches trained", "growing", "see role_time_share of the trainer"),
    Metric("max_updates", "batches", "Batches that the run will train", "", ""),
    Metric("alarms", "alarms", "Alarms that hold now", "0", "slipstream status shows their texts"),
    Metric("queue/groups_generating", "groups", "Groups with an answer missing", "above 0", ""),
    Metric(
        "queue/groups_waiting",
        "groups",
        "Complete groups that wait for a batch",
        "below (algorithm.max_staleness + 1) learner.groups_per_batch",
        "the trainer is the slower side",
    ),
    Metric("queue/groups_training", "groups", "Groups of the batch in training", "", ""),
    Metric(
        "queue/slots_open",
        "slots",
        "Slots that wait for a generator",
        "near 0",
        "no generator takes them: none is alive, or none has the version",
    ),
    Metric("queue/slots_leased", "slots", "Slots at generators or reward daemons", "above 0", ""),
    Metric("queue/slots_answered", "slots", "Answers scored and waiting for the rest of their group", "", ""),
    Metric("queue/eval_groups", "groups", "Groups of an evaluation under way", "", ""),
    Metric(
        "queue/oldest_age_s",
        "s",
        "Age of the oldest group",
        "below coordinator.lease_max_s",
        "one answer holds a batch: slow generator, or reward daemon that does not answer",
    ),
    Metric(
        "queue/journal_mb",
        "MB",
        "Journal on the disk",
        "level",
        "growing without end: coordinator.journal_keep_all, or no checkpoint is committed",
    ),
    Metric(
        "ledger/<state>",
        "slots",
        "Slots by what became of them: issued = trained + filtered + retired + quarantined + in_flight",
        "balanced",
        "slipstream ledger RUN",
    ),
    Metric("staleness_tokens/<age>", "tokens", "Sampled tokens of trained batches by age", "", "", counter=True),
)

FAMILIES = (
    Family(
        "slipstream_run_info",
        ("run", "state"),
        "1",
        "1 for the run and the state that it is in",
        "state is running, evaluating or finished",
        "paused: slipstream status says why",
    ),
    Family(
        "slipstream_role_up",
        ("role", "name"),
        "1",
        "1 for a process that is heard, 0 for one that has gone",
        "1",
        "its log, and its exit status in slipstream status",
    ),
    Family(
        "slipstream_role_version",
        ("role", "name"),
        "versions",
        "Policy version that it holds (-1: none)",
        "at most algorithm.max_staleness behind policy_version",
        "the log of that generator",
    ),
    Family(
        "slipstream_role_progress_age_seconds",
        ("role", "name"),
        "s",
        "Age of the last work done",
        "seconds; an update for the trainer",
        "stuck, or waiting: see role_time_share",
    ),
    Family(
        "slipstream_role_time_share",
        ("role", "name", "cause"),
        "share",
        "Share of the last minute by cause; sums to 1 for each instance",
        "mostly working",
        "docs/tuning.md",
    ),
    Family("slipstream_alarm", ("alarm",), "1", "1 for each alarm that holds now", "none", "docs/operations.md"),
    Family(
        "slipstream_metric", ("metric",), "", "Values under names that are in no table: of packages of your own", "", ""
    ),
)

RECORD_FIELDS = {
    "time": "seconds since 1970 when the batch was reported",
    "attempt": "lineage of the trainer; grows with each start",
    "batch_id": "number of the batch",
    "policy_version": "version after the batch",
    "applied": "optimizer steps applied",
    "skipped": "optimizer steps dropped",
    "replayed": "trained again from the journal after a resume",
    "stage": "stage of the run",
    "trained_tokens": "tokens that counted in the loss",
    "stale_tokens": "sampled tokens beyond the staleness bound",
    "max_token_staleness": "age of the oldest token, in versions",
    "fill_fraction": "packing/fill_fraction",
}
"""Fields of a line of metrics.jsonl beside the metrics of the update."""
