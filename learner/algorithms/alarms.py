"""Collapse alarms: a pure state machine over the metrics of each update.

Three kinds of rule, each on one metric and each of which must hold for ``patience`` updates in a row:

- *limit*: the metric is below or above a fixed bound;
- *drift*: it is farther from its reference, the median of the last ``window`` normal updates, than
  ``max(num_deviations * 1.4826 * MAD, min_relative * |median|, min_absolute)`` in a bad direction. Abnormal updates
  do not enter the reference, so a collapse cannot become the new normal;
- *flat reward*: the mean reward is exactly 0 or 1 for ``flat_reward_updates`` updates.

A value that is not finite alarms at once. An alarm is raised once and stays active until the metric has been normal
for ``patience`` updates or ``acknowledge`` forgets its reference. What to do about it is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

Direction = Literal["below", "above", "both"]


@dataclass(frozen=True)
class Limit:
    """``metric`` must not be ``direction`` (below or above) ``bound``; a name ending in ``/*`` is a prefix."""

    metric: str
    direction: Literal["below", "above"]
    bound: float


@dataclass(frozen=True)
class Drift:
    """``metric`` must not move in ``direction`` by more than both its own noise and the smallest changes given."""

    metric: str
    direction: Direction
    min_relative: float
    min_absolute: float


def default_limits(
    *, min_entropy: float = 0.01, max_kl_behaviour: float = 1.0, min_ess: float = 0.1, max_capped_share: float = 0.5
) -> tuple[Limit, ...]:
    """Entropy and KL in nats per token, ESS as a share of the tokens, capped share overall and by length class."""
    return (
        Limit("actor/entropy", "below", min_entropy),
        Limit("actor/kl_behaviour", "above", max_kl_behaviour),
        Limit("importance/ess", "below", min_ess),
        Limit("importance/capped_share", "above", max_capped_share),
        Limit("importance/capped_share/*", "above", max_capped_share),
    )


DEFAULT_DRIFTS = (
    Drift("actor/entropy", "both", min_relative=0.5, min_absolute=0.02),
    Drift("actor/kl_behaviour", "above", min_relative=4.0, min_absolute=0.02),
    Drift("actor/kl_ref", "above", min_relative=4.0, min_absolute=0.05),
    Drift("response_length/mean", "both", min_relative=0.5, min_absolute=16.0),
    Drift("critic/score/mean", "below", min_relative=0.3, min_absolute=0.05),
    Drift("importance/ess", "below", min_relative=0.3, min_absolute=0.05),
)


@dataclass(frozen=True)
class AlarmConfig:
    """Rules and how long they must hold, in updates."""

    limits: tuple[Limit, ...] = field(default_factory=default_limits)
    drifts: tuple[Drift, ...] = DEFAULT_DRIFTS
    patience: int = 5
    warmup: int = 20
    window: int = 50
    num_deviations: float = 6.0
    flat_reward_updates: int = 20
    reward_metric: str = "critic/score/mean"

    def __post_init__(self) -> None:
        if self.patience < 1 or self.flat_reward_updates < 1 or not 2 <= self.warmup <= self.window:
            raise ValueError("alarms need patience >= 1, flat_reward_updates >= 1 and 2 <= warmup <= window")


@dataclass(frozen=True)
class AlarmEvent:
    """An alarm just raised: the rule and metric, the update and the value, and what was expected of it."""

    rule: str
    metric: str
    update: int
    value: float
    message: str


@dataclass
class CollapseAlarms:
    """Feed every update's metrics to ``observe``; it returns the alarms that this update raised."""

    config: AlarmConfig = field(default_factory=AlarmConfig)
    last_good_update: int | None = None
    """The newest update at which no rule was broken: its checkpoint is the one to protect. (A flat reward counts as
    broken only once its alarm is raised: the first updates of a hard task may well be all 0.)"""
    _references: dict[str, list[float]] = field(default_factory=dict)
    _broken: dict[str, int] = field(default_factory=dict)
    _normal: dict[str, int] = field(default_factory=dict)
    _active: set[str] = field(default_factory=set)

    @property
    def active(self) -> frozenset[str]:
        """Keys ``rule:metric`` of the alarms raised and not over."""
        return frozenset(self._active)

    def observe(self, *, update: int, metrics: Mapping[str, float]) -> list[AlarmEvent]:
        """Judge one update; metrics that are absent are not judged, and their rules keep their state."""
        events: list[AlarmEvent] = []
        any_broken = False
        for key, metric, broken, expected, patience in self._judge(metrics):
            raised = self._advance(key, broken=broken, patience=patience)
            any_broken |= broken and (patience <= self.config.patience or key in self._active)
            if raised:
                value = metrics[metric]
                message = f"{metric} is {value:.4g} at update {update} ({expected})"
                events.append(AlarmEvent(key.split(":")[0], metric, update, value, message))
        if not any_broken:
            self.last_good_update = update
        return events

    def acknowledge(self, key: str) -> None:
        """End an active alarm ``rule:metric`` and learn a new reference for its metric."""
        self._active.discard(key)
        self._broken.pop(key, None)
        self._references.pop(key.split(":", 1)[1], None)

    def _judge(self, metrics: Mapping[str, float]) -> list[tuple[str, str, bool, str, int]]:
        """(key, metric, broken, what was expected, patience) of every rule that has a value to judge."""
        config = self.config
        verdicts = []
        watched = {limit.metric for limit in config.limits} | {drift.metric for drift in config.drifts}
        for metric in sorted(watched | {config.reward_metric}):
            if metric in metrics:
                finite = math.isfinite(metrics[metric])
                verdicts.append((f"non_finite:{metric}", metric, not finite, "expected a finite number", 1))
        finite_metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for limit in config.limits:
            for metric in _matching(limit.metric, finite_metrics):
                value = finite_metrics[metric]
                broken = value < limit.bound if limit.direction == "below" else value > limit.bound
                expected = f"limit: not {limit.direction} {limit.bound:.4g}"
                verdicts.append((f"limit:{metric}", metric, broken, expected, config.patience))
        for drift in config.drifts:
            if drift.metric in finite_metrics:
                broken, expected = self._drifts(drift, finite_metrics[drift.metric])
                verdicts.append((f"drift:{drift.metric}", drift.metric, broken, expected, config.patience))
        if config.reward_metric in finite_metrics:
            broken = finite_metrics[config.reward_metric] in (0.0, 1.0)
            expected = f"the same for {config.flat_reward_updates} updates: nothing to learn from"
            key = f"flat_reward:{config.reward_metric}"
            verdicts.append((key, config.reward_metric, broken, expected, config.flat_reward_updates))
        return verdicts

    def _drifts(self, drift: Drift, value: float) -> tuple[bool, str]:
        history = self._references.setdefault(drift.metric, [])
        broken, expected = False, ""
        if len(history) >= self.config.warmup:
            centre = median(history)
            noise = 1.4826 * median(abs(x - centre) for x in history)
            allowed = max(self.config.num_deviations * noise, drift.min_relative * abs(centre), drift.min_absolute)
            change = value - centre
            broken = abs(change) > allowed and drift.direction in ("both", "below" if change < 0 else "above")
            expected = f"reference {centre:.4g} +- {allowed:.4g}"
        if not broken:
            history.append(value)
            del history[: -self.config.window]
        return broken, expected

    def _advance(self, key: str, *, broken: bool, patience: int) -> bool:
        """Move one rule's state; True when its alarm is raised now."""
        self._broken[key] = self._broken.get(key, 0) + 1 if broken else 0
        self._normal[key] = 0 if broken else self._normal.get(key, 0) + 1
        if self._broken[key] >= patience and key not in self._active:
            self._active.add(key)
            return True
        if self._normal[key] >= self.config.patience:
            self._active.discard(key)
        return False

    def state_dict(self) -> dict[str, Any]:
        """State as plain JSON types."""
        return {
            "last_good_update": self.last_good_update,
            "references": {metric: list(history) for metric, history in self._references.items()},
            "broken": dict(self._broken),
            "normal": dict(self._normal),
            "active": sorted(self._active),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last_good_update = state["last_good_update"]
        self._references = {metric: list(history) for metric, history in state["references"].items()}
        self._broken, self._normal = dict(state["broken"]), dict(state["normal"])
        self._active = set(state["active"])


def _matching(pattern: str, metrics: Mapping[str, float]) -> list[str]:
    if pattern.endswith("/*"):
        return sorted(name for name in metrics if name.startswith(pattern[:-1]))
    return [pattern] if pattern in metrics else []
