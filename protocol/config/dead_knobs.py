"""Settings that somebody set and that have no effect in the chosen mode: an error, with the reason."""

from collections.abc import Callable, Iterator

from protocol.config.keys import get_value, leaf_fields
from protocol.config.load import Loaded
from protocol.config.tree import Config

Rule = tuple[tuple[str, ...], Callable[[Config], bool], str]

RULES: tuple[Rule, ...] = (
    (("algorithm.kl.estimator", "algorithm.kl.coef", "algorithm.kl.controller"),
     lambda c: c.algorithm.kl.where == "off", "algorithm.kl.where = off"),
    (("algorithm.kl.target", "algorithm.kl.horizon"),
     lambda c: c.algorithm.kl.controller == "fixed", "algorithm.kl.controller = fixed"),
    (("algorithm.entropy.target", "algorithm.entropy.delta", "algorithm.entropy.max_coef"),
     lambda c: c.algorithm.entropy.controller == "fixed", "algorithm.entropy.controller = fixed"),
    (("algorithm.behaviour.mode", "algorithm.behaviour.high", "algorithm.behaviour.low"),
     lambda c: c.algorithm.behaviour.level == "off", "algorithm.behaviour.level = off"),
    (("algorithm.behaviour.low",),
     lambda c: c.algorithm.behaviour.mode == "truncate", "algorithm.behaviour.mode = truncate"),
    (("algorithm.proximal",),
     lambda c: c.algorithm.loss not in ("decoupled_ppo", "gspo"),
     "a loss whose ratio is not taken against the proximal policy"),
    (("algorithm.gamma", "algorithm.lam", "algorithm.vtrace", "learner.critic.path", "learner.critic.lr",
      "learner.critic.value_clip", "learner.critic.warmup_updates"),
     lambda c: c.algorithm.advantage != "gae", "an algorithm.advantage other than gae"),
    (("algorithm.passk_k",),
     lambda c: c.algorithm.advantage != "grpo_passk", "an algorithm.advantage other than grpo_passk"),
    (("algorithm.max_filtered_in_a_row",),
     lambda c: c.algorithm.filter_groups == "none" and not any(s.filter_groups == "equal_rewards" for s in c.stages),
     "algorithm.filter_groups = none"),
    (("algorithm.overlong_buffer_tokens", "algorithm.overlong_penalty"),
     lambda c: c.algorithm.overlong != "soft_penalty", "an algorithm.overlong other than soft_penalty"),
    (("model.checkpoint_share",),
     lambda c: not c.model.gradient_checkpointing, "model.gradient_checkpointing = false"),
    (("learner.liger",), lambda c: c.trainer.device == "cpu", "trainer.device = cpu"),
    (("learner.optim.min_lr_ratio",),
     lambda c: c.learner.optim.schedule == "constant", "learner.optim.schedule = constant"),
    (("generators.openai_url",), lambda c: c.generators.backend != "openai", "a generators.backend other than openai"),
    (("generators.devices", "generators.gpu_memory_utilization"),
     lambda c: c.generators.device == "cpu", "generators.device = cpu"),
    (("generators.cpu_kv_cache_gb",), lambda c: c.generators.device == "cuda", "generators.device = cuda"),
    (("trainer.devices",), lambda c: c.trainer.device == "cpu", "trainer.device = cpu"),
    (("run.peers_missing_deadline_s",),
     lambda c: c.run.when_peers_missing == "wait", "run.when_peers_missing = wait"),
    (("data.max_eval_overlap", "evaluation.every_updates", "evaluation.num_prompts", "evaluation.samples",
      "evaluation.temperature"),
     lambda c: not c.data.eval_files, "no data.eval_files"),
    (("rewardd.code.isolation", "rewardd.code.num_workers", "rewardd.code.time_limit_s", "rewardd.code.total_limit_s",
      "rewardd.code.memory_mb", "rewardd.code.max_processes", "rewardd.code.reward"),
     lambda c: not c.rewardd.code.enabled, "rewardd.code.enabled = false"),
)  # fmt: skip


def dead_knobs(loaded: Loaded) -> Iterator[tuple[str, str]]:
    """(key, reason) of every setting that was set away from its default though the mode ignores it."""
    defaults = {k: None if f.is_required() else f.get_default(call_default_factory=True) for k, f in leaf_fields()}
    for keys, is_dead, mode in RULES:
        if not is_dead(loaded.config):
            continue
        for key in keys:
            value = get_value(loaded.config, key)
            if loaded.is_set(key) and value != defaults[key]:
                where = loaded.origins[key]
                yield key, f"{value!r} (set in {where}) has no effect with {mode}: remove it or change the mode"
