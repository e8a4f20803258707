"""Alarms of an unattended run: collapse of entropy or reward, drift from the behaviour policy, filtered for ever."""

from math import isfinite

from protocol.config.learner import AlarmSection


class Alarms:
    """Pure state: `observe` each trained batch, `active` are the alarms that hold now, by slug."""

    def __init__(self, section: AlarmSection) -> None:
        self._section = section
        self._flat_updates = 0
        self.active: dict[str, str] = {}

    def observe(self, metrics: dict[str, float]) -> list[str]:
        """Takes over the metrics of a trained batch; returns the slugs of alarms that are new."""
        before = set(self.active)
        section = self._section
        self._check("entropy", metrics.get("actor/entropy"), low=section.min_entropy, unit="nats per token")
        self._check("kl_behaviour", metrics.get("actor/kl_behaviour"), high=section.max_kl_behaviour, unit="nats")
        self._check("ess", metrics.get("importance/ess"), low=section.min_ess_fraction, unit="of the samples")
        reward = metrics.get("rollout/reward_mean")
        self._flat_updates = self._flat_updates + 1 if reward in (0.0, 1.0) else 0
        flat = self._flat_updates >= section.flat_reward_updates
        self.set("flat_reward", f"mean reward was exactly {reward} for {self._flat_updates} updates" if flat else "")
        return sorted(set(self.active) - before)

    def set(self, slug: str, text: str) -> None:
        """Raises an alarm, or ends it with an empty text."""
        if text:
            self.active[slug] = f"{slug}: {text}"
        else:
            self.active.pop(slug, None)

    def _check(self, slug: str, value: float | None, *, unit: str, low: float = 0.0, high: float = float("inf")) -> None:
        if value is None:
            return
        if not isfinite(value) or value < low:
            self.set(slug, f"{value:.4g} {unit}, below {low:g}")
        elif value > high:
            self.set(slug, f"{value:.4g} {unit}, above {high:g}")
        else:
            self.set(slug, "")
