"""Advisories: what the figures of a run say about its settings. Pure rules over metrics; docs/tuning.md explains each.

A rule looks at means over several batches and gives one line with the setting to turn, or nothing. Every threshold is
a constant here; a metric that is missing keeps its rule silent.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from protocol.config import Config
from protocol.messages import Advice

Values = Mapping[str, float]
Says = Callable[[Values, Config], str]

FEWEST_BATCHES = 3
"""Batches that means are taken over at least: the first ones of a run are about starting up."""


@dataclass(frozen=True)
class Rule:
    """`settings` are those to turn; the first is the one shown."""

    name: str
    settings: tuple[str, ...]
    says: Says


def advise(values: Values, config: Config) -> list[Advice]:
    """The advice of every rule that holds, in the order of RULES."""
    found = []
    for rule in RULES:
        text = rule.says(values, config)
        if text:
            found.append(Advice(rule=rule.name, text=text, setting=rule.settings[0]))
    return found


def means(records: Iterable[Mapping[str, object]]) -> dict[str, float]:
    """Mean of every number of the records, each over the records that have it; empty below FEWEST_BATCHES records."""
    kept = list(records)
    if len(kept) < FEWEST_BATCHES:
        return {}
    columns: dict[str, list[float]] = {}
    for record in kept:
        for name, value in record.items():
            if isinstance(value, int | float):
                columns.setdefault(name, []).append(float(value))
    return {name: sum(column) / len(column) for name, column in columns.items()}


def _share(values: Values, roles: str, *causes: str) -> float:
    return sum(values.get(f"time_share/{roles}/{cause}", 0.0) for cause in causes)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# ------------------------------------------------------------ pace


def _packing(values: Values, config: Config) -> str:
    fill = values.get("packing/fill_fraction", 1.0)
    if fill >= 0.6:
        return ""
    cap = config.learner.max_tokens_per_micro_batch
    return (
        f"micro-batches are {_percent(fill)} full (learner.max_tokens_per_micro_batch = {cap}): lower it towards "
        f"{max(1, round(fill * cap))}, but not below the longest sequence, or raise learner.groups_per_batch"
    )


def _generation(values: Values, config: Config) -> str:
    share = _share(values, "trainer", "generation", "generators")
    if share <= 0.3:
        return ""
    now = max(1, round(values.get("fleet/generators", config.generators.num)))
    wanted = max(now + 1, ceil(now / (1.0 - min(share, 0.75))))
    return f"the trainer waits for generation {_percent(share)} of its time: slipstream scale generators={wanted}"


def _reward(values: Values, config: Config) -> str:
    share = _share(values, "trainer", "reward")
    oldest_s, depth = values.get("fleet/reward_queue_oldest_s", 0.0), values.get("fleet/reward_queue_depth", 0.0)
    limit_s, limit = config.transport.ack_deadline_s / 2, config.rewardd.max_queue / 2
    if share <= 0.1 and oldest_s <= limit_s and depth <= limit:
        return ""
    now = max(1, round(values.get("fleet/reward_daemons", config.rewardd.num)))
    why = (
        f"the trainer waits for it {_percent(share)} of its time, {depth:.0f} answers held, the oldest {oldest_s:.0f} s"
    )
    return (
        f"reward is behind ({why}): slipstream scale rewardd={now + 1}, or more rewardd.math.num_workers and "
        "rewardd.code.num_workers"
    )


def _paced(values: Values, config: Config) -> str:
    share = _share(values, "generators", "staleness")
    if share <= 0.3:
        return ""
    bound = config.algorithm.max_staleness
    now = round(values.get("fleet/generators", config.generators.num))
    text = f"generators are paced by the staleness bound {_percent(share)} of their time: "
    if now > 1:
        return text + f"{max(1, ceil(now * (1.0 - share)))} of {now} generators would do; give the rest to the trainer"
    return text + f"the trainer is the slower side; algorithm.max_staleness = {bound + 1} evens out bursts only"


def _kv_cache(values: Values, config: Config) -> str:
    demand, used = values.get("fleet/kv_demand"), values.get("fleet/slots_used", 0.0)
    generators = config.generators
    if demand is None:
        return ""
    if demand > 1.0:
        text = f"running answers want {_percent(demand)} of the KV cache, so some wait inside the engine: "
        if generators.device != "cpu" and generators.gpu_memory_utilization < 0.85:
            given = f"generators.gpu_memory_utilization = {generators.gpu_memory_utilization:g}"
            return text + f"{given} leaves memory unused; raise it to 0.9"
        slots = max(1, int(generators.max_num_seqs / demand))
        more = "generators.cpu_kv_cache_gb" if generators.device == "cpu" else "generators.tensor_parallel_size"
        return text + f"lower generators.max_num_seqs to {slots}, or raise {more}"
    if demand < 0.5 and used > 0.9:
        slots = int(generators.max_num_seqs * 0.8 / max(demand, 0.1))
        return (
            f"all slots run and want only {_percent(demand)} of the KV cache: raise generators.max_num_seqs to {slots}"
        )
    return ""


def _weights(values: Values, config: Config) -> str:
    trainer, generators = _share(values, "trainer", "weights"), _share(values, "generators", "weights")
    if generators > 0.1:
        hint = (
            "weights.kv_on_update = keep" if config.weights.kv_on_update == "recompute" else "larger weights.bucket_mb"
        )
        return f"generators spend {_percent(generators)} of their time on new weights: {hint}"
    if trainer > 0.1:
        hint = (
            "weights.snapshot = device, if there is room" if config.weights.snapshot == "host" else "weights.bucket_mb"
        )
        return f"the trainer spends {_percent(trainer)} of its time on publishing weights: {hint}"
    return ""


def _checkpoint(values: Values, config: Config) -> str:
    share = _share(values, "trainer", "checkpoint", "disk")
    if share <= 0.1:
        return ""
    checkpoint = config.learner.checkpoint
    if not checkpoint.in_background:
        return f"the trainer spends {_percent(share)} of its time on saving: learner.checkpoint.in_background = true"
    every = 2 * checkpoint.every_updates
    return f"the trainer spends {_percent(share)} of its time on saving: learner.checkpoint.every_updates = {every}"


# ------------------------------------------------------------ learning


def _stale(values: Values, config: Config) -> str:
    share = values.get("staleness/masked_share", 0.0)
    if share <= 0.02:
        return ""
    bound = config.algorithm.max_staleness
    return (
        f"{_percent(share)} of the sampled tokens are too old to be trained: algorithm.max_staleness = {bound + 1}, "
        "or shorter answers (sampling.max_response_tokens)"
    )


def _effective_sample_size(values: Values, config: Config) -> str:
    share = values.get("importance/ess", 1.0)
    if share >= 0.5:
        return ""
    bound = config.algorithm.max_staleness
    if bound == 0:
        hint = "at staleness 0 engine and learner disagree; compare importance/probs_diff_mean and model.dtype"
    elif config.algorithm.behaviour.level == "off":
        hint = f"algorithm.behaviour.level = token, or algorithm.max_staleness = {bound - 1}"
    else:
        hint = f"algorithm.max_staleness = {bound - 1}, or a lower learner.optim.lr"
    return f"the effective sample size is {_percent(share)} of the tokens: {hint}"


def _no_signal(values: Values, config: Config) -> str:
    share = values.get("rollout/equal_reward_groups", 0.0)
    if share <= 0.5:
        return ""
    text = f"{_percent(share)} of the groups have one reward for all answers and teach nothing: "
    if config.algorithm.filter_groups == "none":
        return text + "algorithm.filter_groups = equal_rewards, or other prompts"
    mean = values.get("rollout/reward_mean", 0.5)
    return text + ("easier prompts, or a larger learner.group_size" if mean < 0.5 else "harder prompts")


def _cut(values: Values, config: Config) -> str:
    share = values.get("rollout/truncated_fraction", 0.0)
    if share <= 0.2:
        return ""
    tokens = config.sampling.max_response_tokens
    text = f"{_percent(share)} of the answers are cut at the limit: raise sampling.max_response_tokens (now {tokens})"
    return text + (", or algorithm.overlong = soft_penalty" if config.algorithm.overlong == "none" else "")


def _clipped(values: Values, config: Config) -> str:
    share = values.get("actor/clip_fraction_high", 0.0) + values.get("actor/clip_fraction_low", 0.0)
    if share <= 0.3:
        return ""
    lr, parts = config.learner.optim.lr, config.learner.mini_batches
    hint = f"lower learner.optim.lr (now {lr:g}) or learner.mini_batches (now {parts})"
    return f"{_percent(share)} of the tokens are clipped: {hint}"


def _unjudged(values: Values, config: Config) -> str:
    counts = {name: count for name, count in values.items() if name.startswith("verdicts/")}
    share = counts.get("verdicts/unjudged", 0.0) / (sum(counts.values()) or 1.0)
    if share <= 0.02:
        return ""
    return f"{_percent(share)} of the answers cannot be judged and are thrown away: rewardd's log, `slipstream doctor`"


RULES = (
    Rule("generation", ("generators.num",), _generation),
    Rule("paced", ("generators.num", "algorithm.max_staleness"), _paced),
    Rule("reward", ("rewardd.num", "rewardd.math.num_workers", "rewardd.code.num_workers"), _reward),
    Rule("kv_cache", ("generators.max_num_seqs", "generators.gpu_memory_utilization", "generators.cpu_kv_cache_gb"),
         _kv_cache),
    Rule("packing", ("learner.max_tokens_per_micro_batch", "learner.groups_per_batch"), _packing),
    Rule("weights", ("weights.kv_on_update", "weights.snapshot", "weights.bucket_mb"), _weights),
    Rule("checkpoint", ("learner.checkpoint.every_updates", "learner.checkpoint.in_background"), _checkpoint),
    Rule("stale", ("algorithm.max_staleness", "sampling.max_response_tokens"), _stale),
    Rule("effective_sample_size", ("algorithm.max_staleness", "algorithm.behaviour.level", "learner.optim.lr"),
         _effective_sample_size),
    Rule("no_signal", ("algorithm.filter_groups", "learner.group_size"), _no_signal),
    Rule("cut", ("sampling.max_response_tokens", "algorithm.overlong"), _cut),
    Rule("clipped", ("learner.optim.lr", "learner.mini_batches"), _clipped),
    Rule("unjudged", ("rewardd.max_retries",), _unjudged),
)  # fmt: skip
