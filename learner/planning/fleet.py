"""How many generators and reward daemons, and which staleness bound: predicted by simulating the real coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from learner.coordinator.simulation import Setup, SimulatedGenerator, simulate
from learner.coordinator.simulation_setup import PROMPT_TOKENS

NUM_UPDATES = 16
WARM_UP = 4
MAX_SIMULATED_ANSWERS = 512
"""Larger batches are simulated in proportion: fewer groups, and as many fewer slots per generator."""
CALIBRATIONS = 3
GOOD_ENOUGH = 1.05
"""A setting within 5 % of the fastest is as good."""
REWARDD_SHARE = 0.7
"""Share of its rate that a reward daemon is planned to be busy: answers come in waves."""


@dataclass(frozen=True)
class Workload:
    """What was measured of a run, or is expected of it.

    Attributes:
        lengths: a sample of answer lengths in tokens.
        num_slots: answers a generator samples at once.
        generator_tokens_per_s: of one generator with all slots running.
        update_s: seconds of one update's computation.
        fixed_share: part of an engine's step that does not depend on how many slots run (see SimulatedGenerator).
        prefill_steps: steps of the engine from taking a prompt to its first token.
        between_s: seconds the learner needs from one update to the next even when a batch is ready.
        publish_s: seconds from the end of an update until the generators use its version.
        rewardd_answers_per_s: of one reward daemon; 0 = never the bottleneck.
    """

    groups_per_batch: int
    group_size: int
    lengths: tuple[int, ...]
    num_slots: int
    generator_tokens_per_s: float
    update_s: float
    fixed_share: float = 1.0
    prefill_steps: float = 0.0
    between_s: float = 0.0
    publish_s: float = 1.0
    rewardd_answers_per_s: float = 0.0

    @property
    def batch_tokens(self) -> float:
        """Sampled tokens of a batch, on average."""
        return self.groups_per_batch * self.group_size * float(np.mean(self.lengths))

    @property
    def generation_s(self) -> float:
        """Seconds one generator needs for a batch when nothing holds it back."""
        return self.batch_tokens / self.generator_tokens_per_s


@dataclass(frozen=True)
class Prediction:
    """The steady state of a run with these settings. `generator_idle`: share of the time without a running request;
    `learner_idle`: share not in an update; `stale_share`: tokens left out of the loss for their age."""

    num_generators: int
    max_staleness: int
    seconds_per_update: float
    generator_idle: float
    learner_idle: float
    stale_share: float


@dataclass(frozen=True)
class Plan:
    """The recommendation, and all settings that were looked at."""

    chosen: Prediction
    num_rewardd: int
    predictions: tuple[Prediction, ...]


def predict(
    workload: Workload, *, num_generators: int, max_staleness: int, num_rewardd: int = 1, num_updates: int = NUM_UPDATES
) -> Prediction:
    """Simulates `num_updates` updates; the first ones, and the last ones that run out of prompts, do not count."""
    result = simulate(
        setup_of(
            workload,
            num_generators=num_generators,
            max_staleness=max_staleness,
            num_rewardd=num_rewardd,
            num_updates=num_updates,
        )
    )
    steady = result.batches[WARM_UP - 1 : num_updates]
    span = steady[-1][0] - steady[0][0]
    return Prediction(
        num_generators=num_generators,
        max_staleness=max_staleness,
        seconds_per_update=span / (len(steady) - 1),
        generator_idle=float(np.mean(result.idle)),
        learner_idle=max(0.0, 1.0 - sum(seconds for _, seconds in steady[1:]) / span),
        stale_share=result.masked_share,
    )


def setup_of(
    workload: Workload, *, num_generators: int, max_staleness: int, num_rewardd: int, num_updates: int
) -> Setup:
    """What to simulate for these settings."""
    size = workload.groups_per_batch * workload.group_size
    groups = max(1, round(workload.groups_per_batch / max(1.0, size / MAX_SIMULATED_ANSWERS)))
    generator = SimulatedGenerator(
        slot_tokens_per_s=workload.generator_tokens_per_s / workload.num_slots,
        num_slots=max(1, round(workload.num_slots * groups / workload.groups_per_batch)),
        fixed_share=workload.fixed_share,
        prefill_steps=workload.prefill_steps,
    )
    answers = groups * workload.group_size
    return Setup(
        generators=(generator,) * num_generators,
        num_prompts=(num_updates + max_staleness + 1) * groups,
        group_size=workload.group_size,
        groups_per_batch=groups,
        max_staleness=max_staleness,
        lengths=workload.lengths,
        max_response_tokens=max(workload.lengths),
        train_tokens_per_s=answers * (PROMPT_TOKENS + float(np.mean(workload.lengths))) / workload.update_s,
        publish_s=workload.publish_s,
        between_s=workload.between_s,
        retry_s=max(0.25, workload.update_s / 10),
        heartbeat_s=max(1.0, workload.update_s / 5),
        num_rewardd=num_rewardd,
        rewardd_answers_per_s=workload.rewardd_answers_per_s * answers / size,
    )


def calibrated(workload: Workload, *, slot_tokens_per_s: float, num_generators: int, max_staleness: int) -> Workload:
    """The workload whose simulation, with the settings of a measured run, samples as fast per slot as that run did.

    A run rarely has all slots of a generator busy, and an engine is faster per slot when few are: so the rate with all
    of them running follows only through the simulation.
    """
    for _ in range(CALIBRATIONS):
        result = simulate(
            setup_of(
                workload,
                num_generators=num_generators,
                max_staleness=max_staleness,
                num_rewardd=1,
                num_updates=NUM_UPDATES,
            )
        )
        simulated = result.generated_tokens / result.slot_seconds
        rate = workload.generator_tokens_per_s * slot_tokens_per_s / simulated
        workload = replace(workload, generator_tokens_per_s=rate)
    return workload


def recommend(
    workload: Workload, *, max_generators: int = 0, staleness: Sequence[int] = (0, 1, 2, 4), num_rewardd: int = 0
) -> Plan:
    """The fewest generators, then the smallest staleness bound, within 5 % of the fastest setting looked at.

    Args:
        max_generators: 0 = half as many again as keep the learner busy.
        num_rewardd: 0 = as many as the answers of the fastest run need.
    """
    busy = ceil(workload.generation_s / workload.update_s)
    most = max_generators or max(2, ceil(1.5 * busy))
    counts = sorted({max(1, min(most, count)) for count in (busy - 1, busy, busy + 1, most)})
    daemons = num_rewardd or rewardd_for(workload)
    predictions = tuple(
        predict(workload, num_generators=count, max_staleness=eta, num_rewardd=daemons)
        for count in counts
        for eta in staleness
    )
    fastest = min(prediction.seconds_per_update for prediction in predictions)
    good = [p for p in predictions if p.seconds_per_update <= GOOD_ENOUGH * fastest]
    return Plan(
        chosen=min(good, key=lambda p: (p.num_generators, p.max_staleness)),
        num_rewardd=daemons,
        predictions=predictions,
    )


def rewardd_for(workload: Workload) -> int:
    """Reward daemons that keep up with a learner that never waits."""
    if not workload.rewardd_answers_per_s:
        return 1
    answers_per_s = workload.groups_per_batch * workload.group_size / workload.update_s
    return max(1, ceil(answers_per_s / (REWARDD_SHARE * workload.rewardd_answers_per_s)))
