"""verl settings to ours: what maps one to one by table, what needs arithmetic or other keys by rule."""

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deploy.verl.table import GAE_ONLY, LEFT_OUT, MOVED, MUST_BE, REFUSED, A, R

Settings = Mapping[str, Any]
Fate = Literal["mapped", "same", "left out", "refused"]

ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_passk": "grpo_passk",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
    "remax": "remax",
    "opo": "opo",
}
LOSSES = {"vanilla": "decoupled_ppo", "gspo": "gspo", "cispo": "cispo"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_sum_over_constant",
}
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
OVERLAP = "here generation and training have GPUs of their own, so the machine's GPUs are divided between them"


@dataclass(frozen=True)
class Outcome:
    """What became of one key: `ours` maps our dotted keys to values; `why` explains anything but a plain move."""

    key: str
    fate: Fate
    ours: Mapping[str, Any]
    why: str = ""


def convert(settings: Settings) -> list[Outcome]:
    """The fate of every key, in the order given; verl's default estimator, gae, is not ours and so is said."""
    outcomes = [_fate(key, settings) for key in settings]
    if "algorithm.adv_estimator" not in settings:
        why = "not set, and gae in verl then"
        outcomes.append(Outcome("algorithm.adv_estimator", "mapped", {"algorithm.advantage": "gae"}, why))
    return outcomes


def _fate(key: str, settings: Settings) -> Outcome:
    value = settings[key]
    if isinstance(value, str) and "$" in value:
        return Outcome(key, "refused", {}, f"{value!r} names a variable that is not set: set it, or give the value")
    if key in RULES:
        return RULES[key](key, settings)
    if key in GAE_ONLY:
        return _critic(key, settings)
    if key in MOVED:
        return Outcome(key, "mapped", {MOVED[key]: _as_ours(MOVED[key], value)})
    if key in MUST_BE:
        allowed, why = MUST_BE[key]
        same = value in allowed or (value == "null" and None in allowed)
        return Outcome(key, "same" if same else "refused", {}, why)
    if key in LEFT_OUT:
        return Outcome(key, "left out", {}, LEFT_OUT[key])
    if key in REFUSED:
        return Outcome(key, "refused", {}, REFUSED[key])
    engine = re.match(rf"{R}\.engine_kwargs\.vllm\.(\w+)$", key)
    if engine:
        return Outcome(key, "mapped", {f"generators.engine_args.{engine.group(1)}": value})
    return Outcome(key, "refused", {}, f"unknown key; the nearest known one is {_nearest(key)}")


def _nearest(key: str) -> str:
    known = [*MOVED, *GAE_ONLY, *MUST_BE, *LEFT_OUT, *REFUSED, *RULES]
    return difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]


def _as_ours(ours: str, value: Any) -> Any:
    if ours in ("data.train_files", "data.eval_files"):
        return value if isinstance(value, list) else [value]
    return value


def _critic(key: str, settings: Settings) -> Outcome:
    if settings.get("algorithm.adv_estimator", "gae") == "gae":
        return Outcome(key, "mapped", {GAE_ONLY[key]: settings[key]})
    return Outcome(key, "left out", {}, f"no critic with adv_estimator = {settings['algorithm.adv_estimator']}")


# ------------------------------------------------------------ rules: (key, settings) -> Outcome


def _choice(ours: str, names: Mapping[str, str]) -> Callable[[str, Settings], Outcome]:
    def rule(key: str, settings: Settings) -> Outcome:
        value = str(settings[key])
        if value in names:
            return Outcome(key, "mapped", {ours: names[value]})
        return Outcome(key, "refused", {}, f"{value} is not offered; there are {', '.join(names)}")

    return rule


def _advantage(key: str, settings: Settings) -> Outcome:
    value = str(settings[key])
    if value == "grpo" and settings.get("algorithm.norm_adv_by_std_in_grpo") is False:
        return Outcome(key, "mapped", {"algorithm.advantage": "dr_grpo"})
    return _choice("algorithm.advantage", ADVANTAGES)(key, settings)


def _mini_batches(key: str, settings: Settings) -> Outcome:
    batch, mini = settings.get("data.train_batch_size"), settings[key]
    if not isinstance(batch, int) or not isinstance(mini, int) or batch % mini:
        why = f"{mini} prompts of data.train_batch_size = {batch}: the one must divide the other"
        return Outcome(key, "refused", {}, why)
    return Outcome(key, "mapped", {"learner.mini_batches": batch // mini}, "train_batch_size / ppo_mini_batch_size")


def _clip(key: str, settings: Settings) -> Outcome:
    sides = {"low": "clip_ratio_low", "high": "clip_ratio_high"}
    ours = {f"algorithm.clip_{s}": settings[key] for s, own in sides.items() if f"{A}.{own}" not in settings}
    return Outcome(
        key, "mapped" if ours else "left out", ours, "" if ours else "clip_ratio_low and clip_ratio_high hold"
    )


def _use_kl(where: str) -> Callable[[str, Settings], Outcome]:
    def rule(key: str, settings: Settings) -> Outcome:
        if settings[key] is not True:
            return Outcome(key, "same", {}, "no such KL term is the default")
        other = f"{A}.use_kl_loss" if where == "reward" else "algorithm.use_kl_in_reward"
        if settings.get(other) is True:
            return Outcome(key, "refused", {}, "KL enters the reward or the loss, not both: see algorithm.kl.where")
        return Outcome(key, "mapped", {"algorithm.kl.where": where})

    return rule


def _kl_knob(switch: str, rule: Callable[[str, Settings], Outcome]) -> Callable[[str, Settings], Outcome]:
    def guarded(key: str, settings: Settings) -> Outcome:
        if settings.get(switch) is not True:
            return Outcome(key, "left out", {}, f"no effect without {switch} = true: no reference KL is computed")
        if key in ADAPTIVE_ONLY and settings.get("algorithm.kl_ctrl.type", "fixed") != "adaptive":
            return Outcome(key, "left out", {}, "no effect with algorithm.kl_ctrl.type = fixed (in verl as well)")
        return rule(key, settings)

    return guarded


def _move(ours: str, why: str = "") -> Callable[[str, Settings], Outcome]:
    return lambda key, settings: Outcome(key, "mapped", {ours: settings[key]}, why)


ADAPTIVE_ONLY = ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon")


def _warmup_ratio(key: str, settings: Settings) -> Outcome:
    ratio, steps = settings[key], settings.get("trainer.total_training_steps")
    if f"{A}.optim.lr_warmup_steps" in settings and settings[f"{A}.optim.lr_warmup_steps"] not in (None, -1):
        return Outcome(key, "left out", {}, "lr_warmup_steps holds")
    if not ratio:
        return Outcome(key, "same", {}, "no warm-up is the default")
    if not isinstance(steps, int):
        return Outcome(key, "refused", {}, "a share of trainer.total_training_steps, which is not set: set it")
    return Outcome(key, "mapped", {"learner.optim.warmup_updates": round(ratio * steps)}, f"{ratio} of {steps} updates")


def _warmup_steps(key: str, settings: Settings) -> Outcome:
    if settings[key] in (None, -1):
        return Outcome(key, "same", {}, "unset")
    return Outcome(key, "mapped", {"learner.optim.warmup_updates": settings[key]})


def _betas(key: str, settings: Settings) -> Outcome:
    first, second = settings[key]
    return Outcome(key, "mapped", {"learner.optim.beta1": first, "learner.optim.beta2": second})


def _offload(ours: str) -> Callable[[str, Settings], Outcome]:
    return lambda key, settings: Outcome(key, "mapped", {ours: "cpu" if settings[key] is True else "none"})


def _backend(key: str, settings: Settings) -> Outcome:
    if settings[key] == "vllm":
        return Outcome(key, "mapped", {"generators.backend": "vllm"})
    why = "generators run vLLM; a server with token ids and log-probs can be used with generators.backend = openai"
    return Outcome(key, "refused", {}, f"{settings[key]}: {why}")


def _same_length(other: str) -> Callable[[str, Settings], Outcome]:
    def rule(key: str, settings: Settings) -> Outcome:
        if settings[key] == settings.get(other):
            return Outcome(key, "same", {}, f"{other} holds")
        if other not in settings:
            return Outcome(key, "mapped", {MOVED[other]: settings[key]})
        return Outcome(
            key, "refused", {}, f"{settings[key]} contradicts {other} = {settings[other]}: there is one length"
        )

    return rule


def _val_temperature(key: str, settings: Settings) -> Outcome:
    if not settings[key]:
        return Outcome(key, "mapped", {"evaluation.greedy": True}, "temperature 0 is the greedy evaluation")
    return Outcome(key, "mapped", {"evaluation.temperature": settings[key]})


def _frequency(ours: str, *, off: Any) -> Callable[[str, Settings], Outcome]:
    def rule(key: str, settings: Settings) -> Outcome:
        if settings[key] > 0:
            return Outcome(key, "mapped", {ours: settings[key]})
        if off is None:
            return Outcome(key, "left out", {}, "checkpoints are always saved: see learner.checkpoint")
        return Outcome(key, "mapped", {ours: off}, "off")

    return rule


def _name(key: str, settings: Settings) -> Outcome:
    return Outcome(key, "mapped", {"run.name": re.sub(r"[^A-Za-z0-9._-]+", "-", str(settings[key]))})


def _gpus(key: str, settings: Settings) -> Outcome:
    gpus, parallel = settings[key], settings.get(f"{R}.tensor_model_parallel_size", 1)
    if gpus == 1:
        return Outcome(
            key, "mapped", {"trainer.num_ranks": 1, "generators.num": 1}, "both share the one GPU (weights: ipc)"
        )
    ranks = gpus // 2
    generators = max(1, (gpus - ranks) // parallel)
    return Outcome(key, "mapped", {"trainer.num_ranks": ranks, "generators.num": generators}, OVERLAP)


def _resume(key: str, settings: Settings) -> Outcome:
    modes = {"auto": "auto", "disable": "never"}
    if settings[key] == "resume_path":
        return Outcome(key, "left out", {}, "trainer.resume_from_path holds")
    return _choice("learner.checkpoint.resume", modes)(key, settings)


def _logger(key: str, settings: Settings) -> Outcome:
    names = settings[key] if isinstance(settings[key], list) else [settings[key]]
    sinks = [name for name in names if name in ("tensorboard", "wandb", "trackio")]
    others = [name for name in names if name not in (*sinks, "console", "file")]
    why = "metrics.jsonl, logs and Prometheus are always there"
    if others:
        why += f"; {', '.join(others)}: a package may offer it as an entry point of slipstream.metric_sinks"
    if sinks:
        return Outcome(key, "mapped", {"sinks.names": sinks}, why)
    return Outcome(key, "left out", {}, why)


def _filter(key: str, settings: Settings) -> Outcome:
    return Outcome(key, "mapped", {"algorithm.filter_groups": "equal_rewards" if settings[key] else "none"})


def _overlong(key: str, settings: Settings) -> Outcome:
    return Outcome(key, "mapped", {"algorithm.overlong": "soft_penalty" if settings[key] else "none"})


def _adaptive_entropy(key: str, settings: Settings) -> Outcome:
    return Outcome(key, "mapped", {"algorithm.entropy.controller": "adaptive" if settings[key] else "fixed"})


def _staleness(key: str, settings: Settings) -> Outcome:
    why = "verl's is a quota of samples between updates; here every token is at most this many versions old"
    return Outcome(key, "mapped", {"algorithm.max_staleness": math.ceil(settings[key])}, why)


def _rejection(key: str, settings: Settings) -> Outcome:
    if not settings[key]:
        return Outcome(key, "same", {}, "no filter is the default")
    why = "groups of equal rewards are left out and refilled"
    return Outcome(key, "mapped", {"algorithm.filter_groups": "equal_rewards"}, why)


KL_LOSS, KL_REWARD = f"{A}.use_kl_loss", "algorithm.use_kl_in_reward"
SCHEDULES = {"constant": "constant", "cosine": "cosine"}

RULES: dict[str, Callable[[str, Settings], Outcome]] = {
    "algorithm.adv_estimator": _advantage,
    "algorithm.norm_adv_by_std_in_grpo": lambda key, s: Outcome(key, "same", {}, "decides between grpo and dr_grpo"),
    f"{A}.ppo_mini_batch_size": _mini_batches,
    f"{A}.clip_ratio": _clip,
    f"{A}.loss_agg_mode": _choice("algorithm.aggregation", AGGREGATIONS),
    f"{A}.policy_loss.loss_mode": _choice("algorithm.loss", LOSSES),
    f"{A}.entropy_coeff": _move("algorithm.entropy.coef"),
    f"{A}.use_adaptive_entropy": _adaptive_entropy,
    f"{A}.adaptive_entropy.enabled": _adaptive_entropy,
    f"{A}.adaptive_entropy.target_entropy": _move("algorithm.entropy.target"),
    f"{A}.adaptive_entropy.entropy_coeff_delta": _move("algorithm.entropy.delta"),
    f"{A}.adaptive_entropy.max_ent_coef": _move("algorithm.entropy.max_coef"),
    KL_LOSS: _use_kl("loss"),
    f"{A}.kl_loss_coef": _kl_knob(KL_LOSS, _move("algorithm.kl.coef")),
    f"{A}.kl_loss_type": _kl_knob(KL_LOSS, _choice("algorithm.kl.estimator", ESTIMATORS)),
    KL_REWARD: _use_kl("reward"),
    "algorithm.kl_penalty": _kl_knob(KL_REWARD, _choice("algorithm.kl.estimator", ESTIMATORS)),
    "algorithm.kl_ctrl.type": _kl_knob(KL_REWARD, _move("algorithm.kl.controller")),
    "algorithm.kl_ctrl.kl_coef": _kl_knob(KL_REWARD, _move("algorithm.kl.coef", "of the KL to the reference policy")),
    "algorithm.kl_ctrl.target_kl": _kl_knob(KL_REWARD, _move("algorithm.kl.target")),
    "algorithm.kl_ctrl.horizon": _kl_knob(KL_REWARD, _move("algorithm.kl.horizon", "in sequences; not a window")),
    f"{A}.optim.lr_warmup_steps": _warmup_steps,
    f"{A}.optim.lr_warmup_steps_ratio": _warmup_ratio,
    f"{A}.optim.warmup_style": _choice("learner.optim.schedule", SCHEDULES),
    f"{A}.optim.lr_scheduler_type": _choice("learner.optim.schedule", SCHEDULES),
    f"{A}.optim.betas": _betas,
    f"{A}.fsdp_config.param_offload": _offload("learner.zero.offload_param"),
    f"{A}.fsdp_config.optimizer_offload": _offload("learner.zero.offload_optimizer"),
    f"{R}.name": _backend,
    f"{R}.prompt_length": _same_length("data.max_prompt_length"),
    f"{R}.response_length": _same_length("data.max_response_length"),
    f"{R}.val_kwargs.temperature": _val_temperature,
    f"{R}.val_temperature": _val_temperature,
    "reward_model.overlong_buffer.enable": _overlong,
    "algorithm.filter_groups.enable": _filter,
    "trainer.rejection_sample": _rejection,
    "trainer.save_freq": _frequency("learner.checkpoint.every_updates", off=None),
    "trainer.test_freq": _frequency("evaluation.every_updates", off=0),
    "trainer.experiment_name": _name,
    "trainer.n_gpus_per_node": _gpus,
    "trainer.resume_mode": _resume,
    "trainer.logger": _logger,
    "async_training.staleness_threshold": _staleness,
}


def equivalent(outcomes: list[Outcome]) -> dict[str, Any]:
    """Our settings as a tree of sections."""
    tree: dict[str, Any] = {}
    for dotted, value in _in_order(outcomes):
        *sections, name = dotted.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def _in_order(outcomes: list[Outcome]) -> Iterator[tuple[str, Any]]:
    for outcome in outcomes:
        yield from outcome.ours.items()
