"""Alarms of an unattended run: collapse and drift of training metrics, and conditions the coordinator sees itself."""

import json
from typing import Any

from learner.algorithms.alarms import AlarmConfig, CollapseAlarms, default_limits
from protocol.config.learner import AlarmSection


class Alarms:
    """`active` maps the slug of each alarm that holds now to one line of text.

    Collapse alarms (`learner.algorithms.alarms`) are fed with each trained batch; conditions of the coordinator are
    set and ended by slug.
    """

    def __init__(self, section: AlarmSection, *, state: dict[str, Any] | None = None) -> None:
        limits = default_limits(
            min_entropy=section.min_entropy,
            max_kl_behaviour=section.max_kl_behaviour,
            min_ess=section.min_ess_fraction,
        )
        self._collapse = CollapseAlarms(
            AlarmConfig(
                limits=limits,
                flat_reward_updates=section.flat_reward_updates,
                reward_metric="rollout/reward_mean",
            )
        )
        self.active: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        if state is not None:
            self._collapse.load_state_dict(state["collapse"])
            self._texts = state["texts"]
            self._show_collapse()

    def observe(self, metrics: dict[str, float], *, update: int) -> list[str]:
        """Takes over the metrics of a trained batch; returns the texts of the alarms it raised."""
        events = self._collapse.observe(update=update, metrics=metrics)
        self._texts |= {f"{event.rule}:{event.metric}": event.message for event in events}
        self._show_collapse()
        return [event.message for event in events]

    @property
    def protected_batch(self) -> int:
        """While a collapse alarm is on: the newest batch at which no rule was broken (0: none was); otherwise -1."""
        return (self._collapse.last_good_update or 0) if self._collapse.active else -1

    def set(self, slug: str, text: str) -> None:
        """Raises an alarm, or ends it with an empty text."""
        if text:
            self.active[slug] = f"{slug}: {text}"
        else:
            self.active.pop(slug, None)

    def state_dict(self) -> dict[str, Any]:
        """What a restart needs to go on, as plain values."""
        state: dict[str, Any] = json.loads(json.dumps({"collapse": self._collapse.state_dict(), "texts": self._texts}))
        return state

    def _show_collapse(self) -> None:
        self._texts = {key: text for key, text in self._texts.items() if key in self._collapse.active}
        self.active = {slug: text for slug, text in self.active.items() if ":" not in slug} | self._texts
