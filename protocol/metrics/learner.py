"""Metrics of an update, as the trainer sends them with each trained batch."""

from protocol.metrics.base import Metric

TOKENS = "trained tokens"
NATS = "nats/token"

POLICY = (
    Metric(
        "actor/loss",
        "1",
        "Loss of the update with all its terms; its level means little under normalised advantages",
        "finite",
        "not finite is dropped and counted in learner/skipped_steps",
    ),
    Metric("actor/pg_loss", "1", "Policy-gradient part of the loss", "around 0", ""),
    Metric(
        "actor/entropy",
        NATS,
        "Exact entropy of the current policy over the trained tokens",
        "0.05 to 2, falling slowly",
        "near 0: collapse; lower learner.optim.lr, raise algorithm.entropy.coef or "
        "algorithm.clip_high; growing without end: lower algorithm.entropy.coef",
    ),
    Metric(
        "actor/entropy_loss",
        NATS,
        "Mean negative log-likelihood of the trained tokens",
        "close to actor/entropy",
        "far above it: the answers are not this policy's; see actor/kl_behaviour",
    ),
    Metric(
        "actor/ppo_kl",
        NATS,
        "How far the policy moved within the update (proximal over current)",
        "below 0.02",
        "lower learner.optim.lr or learner.mini_batches",
    ),
    Metric(
        "actor/kl_behaviour",
        NATS,
        "Behaviour policy over current: staleness plus the engines' mismatch",
        "below 0.05; 0.001 to 0.01 at staleness 0",
        "lower algorithm.max_staleness; at staleness 0 compare importance/probs_diff_mean: engine and learner disagree",
    ),
    Metric(
        "actor/kl_ref",
        NATS,
        "KL to the reference policy",
        "below 1, growing slowly",
        "raise algorithm.kl.coef or lower learner.optim.lr",
    ),
    Metric(
        "actor/ratio_mean",
        "1",
        "Mean ratio of current to proximal policy",
        "0.99 to 1.01",
        "lower learner.optim.lr or learner.mini_batches",
    ),
    Metric(
        "actor/ratio_share/<bin>",
        "share",
        "Histogram of the ratio; a bin is named by one edge",
        "nearly all in the bins around 1",
        "as actor/ratio_mean",
    ),
    Metric(
        "actor/clip_fraction_high",
        "share",
        "Trained tokens clipped from above",
        "below 0.1",
        "lower learner.optim.lr or learner.mini_batches, or raise algorithm.clip_high",
    ),
    Metric(
        "actor/clip_fraction_low",
        "share",
        "Trained tokens clipped from below",
        "below 0.1",
        "lower learner.optim.lr or learner.mini_batches",
    ),
    Metric(
        "actor/clip_fraction_dual",
        "share",
        "Trained tokens under the dual clip",
        "below 0.01",
        "lower algorithm.max_staleness",
    ),
    Metric(
        "actor/bounded_share",
        "share",
        "Trained tokens whose log-ratio was bounded to stay finite",
        "0",
        "policies have drifted apart: lower algorithm.max_staleness and learner.optim.lr",
    ),
    Metric(
        "actor/grad_norm",
        "1",
        "Gradient norm before clipping, mean over the update's steps",
        "stable",
        "growing: lower learner.optim.lr; always above learner.optim.grad_clip: every step is clipped",
    ),
    Metric(
        "actor/grad_norm/max", "1", "Largest gradient norm of the update's steps", "within 3 of actor/grad_norm", ""
    ),
    Metric("actor/lr", "1", "Learning rate of the update", "as configured", ""),
)

IMPORTANCE = (
    Metric(
        "importance/ess",
        "share",
        "Effective sample size of the behaviour weights over the trained tokens",
        "above 0.5",
        "lower algorithm.max_staleness, or truncate weights (algorithm.behaviour)",
    ),
    Metric(
        "importance/rho_mean",
        "1",
        "Mean of proximal over behaviour probability, before bounds",
        "0.95 to 1.05",
        "lower algorithm.max_staleness",
    ),
    Metric(
        "importance/weight_mean",
        "1",
        "Mean behaviour weight after bounds",
        "0.9 to 1.05",
        "lower algorithm.max_staleness, or widen algorithm.behaviour.high",
    ),
    Metric(
        "importance/capped_share",
        "share",
        "Trained tokens whose weight was truncated or masked",
        "below 0.1",
        "lower algorithm.max_staleness, or widen algorithm.behaviour.high and low",
    ),
    Metric(
        "importance/capped_share/<length_class>",
        "share",
        "The same by length of the answer",
        "below 0.2 in every class",
        "long answers only: algorithm.behaviour.level = token or geometric",
    ),
    Metric(
        "importance/probs_diff_mean",
        "probability",
        "Mean difference of proximal and behaviour probability",
        "below 0.02",
        "at staleness 0: engine and learner compute differently; see model.dtype and generators.engine_args",
    ),
)

CRITIC = (
    Metric("critic/vf_loss", "1", "Value loss", "falling, then level", "lower learner.critic.lr"),
    Metric("critic/vf_clipfrac", "share", "Tokens whose value was clipped", "below 0.2", "lower learner.critic.lr"),
    Metric(
        "critic/vf_explained_var",
        "1",
        "Variance of the returns that the critic explains",
        "above 0.3",
        "longer learner.critic.warmup_updates, or higher learner.critic.lr",
    ),
    Metric("critic/vpred_mean", "reward", "Mean value", "close to critic/returns_mean", "as critic/vf_explained_var"),
    Metric("critic/returns_mean", "reward", "Mean return", "", ""),
    Metric("critic/advantages/mean", "reward", "Mean advantage before whitening", "around 0", ""),
    Metric(
        "critic/advantages/std",
        "reward",
        "Standard deviation of the advantages before whitening",
        "above 0",
        "0: no answer differs from what the critic expects",
    ),
    Metric("critic/grad_norm", "1", "Gradient norm of the critic's steps", "stable", "lower learner.critic.lr"),
    Metric(
        "critic/skipped_steps", "steps", "Steps of the critic without a finite gradient", "0", "lower learner.critic.lr"
    ),
    Metric(
        "critic/score/mean",
        "reward",
        "Mean score of the batch's answers",
        "rising",
        "flat at 0 or 1: data and verifier do not fit, or the task is too hard or too easy",
    ),
    Metric("critic/score/max", "reward", "Largest score", "", ""),
    Metric("critic/score/min", "reward", "Smallest score", "", ""),
    Metric("critic/score/<source>/mean", "reward", "Mean score of a data source", "rising", "as critic/score/mean"),
    Metric("critic/rewards/mean", "reward", "Mean reward after shaping", "rising", "as critic/score/mean"),
)

BATCH = (
    Metric(
        "batch/solve_none",
        "share",
        "Groups without any solved answer",
        "below 0.5",
        "easier prompts, or a larger learner.group_size",
    ),
    Metric(
        "batch/solve_all",
        "share",
        "Groups with every answer solved",
        "below 0.5",
        "harder prompts, or data.skip_after_solved",
    ),
    Metric(
        "batch/solve_partly", "share", "Groups with some answers solved", "above 0.3", "as rollout/equal_reward_groups"
    ),
    Metric(
        "batch/without_adv_ratio",
        "share",
        "Groups whose answers all have one reward",
        "below 0.5",
        "algorithm.filter_groups = equal_rewards",
    ),
    Metric(
        "response_length/mean",
        "tokens",
        "Mean length of the answers",
        "no jumps",
        "growing with response_length/cut_share: raise sampling.max_response_tokens or algorithm.overlong",
    ),
    Metric("response_length/max", "tokens", "Longest answer", "", ""),
    Metric(
        "response_length/cut_share",
        "share",
        "Answers cut at the token limit",
        "below 0.1",
        "raise sampling.max_response_tokens, or algorithm.overlong = soft_penalty",
    ),
    Metric("prompt_length/mean", "tokens", "Mean length of the prompts", "", ""),
    Metric(
        "staleness/masked_share",
        "share",
        "Sampled tokens older than the bound: they leave the loss",
        "below 0.02",
        "shorter answers, fewer generators, or a larger algorithm.max_staleness",
    ),
    Metric("staleness/age_mean", "versions", "Mean age of the sampled tokens", "below algorithm.max_staleness", ""),
    Metric("staleness/age_share/<age>", "share", "Sampled tokens by age; over: older than the bound", "", ""),
    Metric(
        "staleness/max",
        "versions",
        "Age of the oldest token of the batch",
        "at most algorithm.max_staleness + 1",
        "as staleness/masked_share",
    ),
    Metric(
        "packing/fill_fraction",
        "share",
        "Tokens of the micro-batches over their room",
        "above 0.6",
        "raise learner.max_tokens_per_micro_batch, or lower it towards the longest answer",
    ),
    Metric(
        "packing/oldest_age_s",
        "s",
        "Age of the batch's oldest group when it was planned",
        "",
        "see coordinator.lease_max_s",
    ),
)

LEARNER = (
    Metric("learner/applied_steps", "steps", "Optimizer steps applied", "learner.mini_batches", ""),
    Metric(
        "learner/skipped_steps",
        "steps",
        "Steps dropped because a gradient was not finite or nothing was trained",
        "0",
        "lower learner.optim.lr; look at importance/ess",
    ),
    Metric("learner/trained_tokens", "tokens", "Tokens that counted in the loss", "", ""),
    Metric("learner/kl_coef", "1", "KL coefficient after the controller", "", ""),
    Metric(
        "learner/entropy_coef",
        "1",
        "Entropy coefficient after the controller",
        "below algorithm.entropy.max_coef",
        "at the maximum: the entropy falls whatever it does; lower learner.optim.lr",
    ),
    Metric(
        "learner/resident_mb",
        "MB",
        "Resident memory of the trainer's first rank",
        "level",
        "growing without end: trainer.memory_limit_gb restarts it in order",
    ),
    Metric(
        "perf/update_seconds",
        "s",
        "One update, without waiting for its batch",
        "stable",
        "learner.max_tokens_per_micro_batch, model.gradient_checkpointing",
    ),
    Metric("perf/learner_tokens_per_second", "tokens/s", "Prompt and answer tokens trained per second", "stable", ""),
    Metric("perf/throughput", "tokens/s", "The same per rank", "stable", ""),
    Metric(
        "perf/mfu/actor",
        "share",
        "Model FLOPs utilisation of the policy's pass",
        "0.3 to 0.6 on GPUs",
        "see packing/fill_fraction; raise learner.max_tokens_per_micro_batch",
    ),
)

SFT = (
    Metric("sft/loss", NATS, "Supervised loss", "falling", "lower sft.optim.lr"),
    Metric("sft/entropy", NATS, "Entropy over the trained tokens", "", ""),
    Metric("sft/grad_norm", "1", "Gradient norm before clipping", "stable", "lower sft.optim.lr"),
    Metric("sft/lr", "1", "Learning rate", "as configured", ""),
    Metric("sft/tokens", "tokens", "Tokens trained in the step", "", ""),
)
