"""What `slipstream plan` computes and prints."""

import dataclasses
from typing import Any

import numpy as np

from learner.planning.fleet import Plan, Prediction, Workload, predict, recommend
from learner.planning.measured import Measured
from protocol.config import Config
from protocol.config.memory import GIB, Advice, MemoryEstimate, ModelFacts, advise, kv_sequences, trainer_memory
from protocol.errors import UserError

NEEDED = ("--tokens-per-s", "--update-s", "--mean-tokens")
FIXED_SHARE = {"cpu": 0.15, "cuda": 0.8}
"""Part of an engine's step that does not depend on how many answers it samples (reading the weights, launches)."""


def given_workload(config: Config, tokens_per_s: float, update_s: float, mean_tokens: float) -> Workload | None:
    """The workload of the command line, None when nothing of it was given.

    Lengths, of which only the mean is known, are drawn from an exponential distribution up to the longest answer.
    """
    given = (tokens_per_s, update_s, mean_tokens)
    if not any(given):
        return None
    if not all(value > 0.0 for value in given):
        raise UserError(f"{', '.join(NEEDED)} belong together, each above 0")
    return Workload(
        groups_per_batch=config.learner.groups_per_batch,
        group_size=config.learner.group_size,
        lengths=exponential_lengths(mean_tokens, longest=config.sampling.max_response_tokens),
        num_slots=config.generators.max_num_seqs,
        generator_tokens_per_s=tokens_per_s,
        update_s=update_s,
    )


def exponential_lengths(mean: float, *, longest: int, number: int = 1000) -> tuple[int, ...]:
    """Quantiles of an exponential distribution cut at `longest`, scaled so that their mean is `mean`.

    Raises UserError when no such distribution has that mean.
    """
    if mean >= longest:
        raise UserError(f"--mean-tokens {mean:g} must be below sampling.max_response_tokens = {longest}")
    quantiles = -np.log(1.0 - (np.arange(number) + 0.5) / number)
    low, high = 0.0, 1e4 * longest
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * quantiles, longest).mean() < mean else (low, middle)
    return tuple(int(length) for length in np.clip(np.round(high * quantiles), 1, longest))


def fleet(workload: Workload, config: Config, measured: Measured | None, *, max_generators: int) -> dict[str, Any]:
    """The recommendation, and for a measured run the prediction of its own settings."""
    plan = recommend(workload, max_generators=max_generators)
    result: dict[str, Any] = {
        "workload": {key: value for key, value in dataclasses.asdict(workload).items() if key != "lengths"}
        | {"mean_tokens": workload.batch_tokens / workload.groups_per_batch / workload.group_size},
        "recommended": recommended(plan),
        "predictions": [dataclasses.asdict(prediction) for prediction in plan.predictions],
    }
    if measured is not None:
        own = predict(
            workload,
            num_generators=max(1, config.generators.num),
            max_staleness=config.algorithm.max_staleness,
            num_rewardd=max(1, config.rewardd.num),
        )
        result["measured"] = {
            "seconds_per_update": measured.seconds_per_update,
            "learner_idle": measured.learner_idle,
            "num_updates": measured.num_updates,
        }
        result["predicted"] = dataclasses.asdict(own)
    return result


def recommended(plan: Plan) -> dict[str, Any]:
    """The choice as overrides with what to expect."""
    return dataclasses.asdict(plan.chosen) | {
        "num_rewardd": plan.num_rewardd,
        "overrides": [
            f"generators.num={plan.chosen.num_generators}",
            f"rewardd.num={plan.num_rewardd}",
            f"algorithm.max_staleness={plan.chosen.max_staleness}",
        ],
    }


def memory(config: Config, *, device_bytes: float) -> dict[str, Any]:
    """Estimate of the configuration as it is, and the settings that fit; GiB."""
    facts = ModelFacts.of_folder(config.model.path)
    now, advice = trainer_memory(facts, config), advise(facts, config, device_bytes=device_bytes)
    return {
        "num_params": facts.num_params,
        "device_gib": device_bytes / GIB,
        "configured": _gib(now) | {"fits": now.fits(device_bytes)},
        "recommended": None if advice is None else advised(advice),
        "kv_cache_sequences": kv_sequences(facts, config, device_bytes=device_bytes),
    }


def advised(advice: Advice) -> dict[str, Any]:
    """Settings that fit, as overrides, with their estimate."""
    return _gib(advice.estimate) | {"overrides": advice.overrides()}


def _gib(estimate: MemoryEstimate) -> dict[str, Any]:
    return {
        "total_gib": estimate.total / GIB,
        "host_gib": estimate.host / GIB,
        "parts_gib": {name: size / GIB for name, size in estimate.parts.items()},
    }


# ---------------------------------------------------------------- for people


def lines_of(result: dict[str, Any]) -> list[str]:
    """The result as a person reads it."""
    lines: list[str] = []
    if "workload" in result:
        lines += _fleet_lines(result)
    if "memory" in result:
        lines += _memory_lines(result["memory"])
    return lines


def _fleet_lines(result: dict[str, Any]) -> list[str]:
    load = result["workload"]
    lines = [
        f"batch      {load['groups_per_batch']} groups x {load['group_size']} answers "
        f"of {load['mean_tokens']:.1f} tokens",
        f"rates      {load['generator_tokens_per_s']:.0f} tokens/s per generator, {load['update_s']:.2f} s per update",
    ]
    if "measured" in result:
        seen, own = result["measured"], result["predicted"]
        lines.append(
            f"this run   {seen['seconds_per_update']:.2f} s per update, learner idle {seen['learner_idle']:.0%}; "
            f"predicted {own['seconds_per_update']:.2f} s, {max(0.0, own['learner_idle']):.0%} "
            f"(generators idle {own['generator_idle']:.0%})"
        )
    lines.append("generators  eta  s/update  generators idle  learner idle  too old")
    lines += [_row(Prediction(**prediction)) for prediction in result["predictions"]]
    return [*lines, f"recommended  {' '.join(result['recommended']['overrides'])}"]


def _row(p: Prediction) -> str:
    return (
        f"{p.num_generators:10d}  {p.max_staleness:3d}  {p.seconds_per_update:8.2f}  {p.generator_idle:15.0%}  "
        f"{max(0.0, p.learner_idle):12.0%}  {p.stale_share:7.1%}"
    )


def _memory_lines(found: dict[str, Any]) -> list[str]:
    now, best = found["configured"], found["recommended"]
    lines = [
        f"memory     {found['num_params'] / 1e9:.2f} B parameters: about {now['total_gib']:.1f} GiB per trainer rank, "
        + ("fits" if now["fits"] else "does not fit")
        + f" a device of {found['device_gib']:.0f} GiB"
    ]
    lines += [f"           {size:8.2f} GiB  {name}" for name, size in now["parts_gib"].items()]
    if best is None:
        lines.append("recommended  none fits: use more ranks (trainer.num_ranks) or shorter micro-batches")
    else:
        lines.append(f"recommended  {' '.join(best['overrides'])}  ({best['total_gib']:.1f} GiB)")
    return [*lines, f"generator  its KV cache holds {found['kv_cache_sequences']} sequences of the longest length"]
