"""Rules on whole groups: malformed groups, groups without signal, prompts that are solved. Pure Python.

A group is judged as a whole and before advantages are computed, so a rule can never leave a part of one behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Rule = Literal["none", "equal_rewards"]


def malformed_groups(
    groups: Sequence[str | int | None], *, prompts: Sequence[str | int], group_size: int
) -> dict[str | int | None, str]:
    """Groups that must not reach the update, with the reason: no id, wrong size, or answers to several prompts.

    ``groups[i]`` and ``prompts[i]`` identify the group and the prompt of trajectory i.
    """
    members: dict[str | int | None, list[str | int]] = {}
    for group, prompt in zip(groups, prompts, strict=True):
        members.setdefault(group, []).append(prompt)
    bad: dict[str | int | None, str] = {}
    for group, own in members.items():
        if group is None:
            bad[group] = f"{len(own)} trajectories have no group id"
        elif len(own) != group_size:
            bad[group] = f"group {group} has {len(own)} answers instead of {group_size}"
        elif len(set(own)) > 1:
            bad[group] = f"group {group} mixes {len(set(own))} prompts"
    return bad


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ, so that a group baseline leaves something to learn."""
    return any(reward != rewards[0] for reward in rewards)


@dataclass(frozen=True)
class Admission:
    """``keep``: train the group. ``reason``: why not, or why in spite of the rule. ``alarm``: the run of filtered
    groups has just reached its limit."""

    keep: bool
    reason: str = ""
    alarm: bool = False


@dataclass
class GroupFilter:
    """Applies ``rule`` to group after group, and never for ever.

    ``equal_rewards`` filters groups without signal. When ``max_in_a_row`` groups in a row have been filtered, the
    last of them raises the alarm and the ones after it are trained, with advantage 0, until one has signal again:
    the learner goes on, visibly, instead of waiting for a group that may not come.
    """

    rule: Rule = "none"
    max_in_a_row: int = 1000
    num_in_a_row: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.rule not in ("none", "equal_rewards"):
            raise ValueError(f"filter_groups must be none or equal_rewards, got {self.rule!r}")
        if self.max_in_a_row < 1:
            raise ValueError(f"max_filtered_in_a_row must be at least 1, got {self.max_in_a_row}")

    def admit(self, rewards: Sequence[float]) -> Admission:
        """Judge the next group by the rewards of its answers."""
        if has_signal(rewards):
            self.num_in_a_row = 0
            self.counts["kept"] += 1
            return Admission(True)
        if self.rule == "none":
            self.counts["kept_without_signal"] += 1
            return Admission(True, "all rewards equal, but no filter is set")
        if self.num_in_a_row >= self.max_in_a_row:
            self.counts["kept_without_signal"] += 1
            return Admission(True, f"{self.num_in_a_row} groups in a row without signal: training goes on without")
        self.num_in_a_row += 1
        self.counts["filtered"] += 1
        return Admission(False, f"all rewards equal {rewards[0]}", alarm=self.num_in_a_row == self.max_in_a_row)

    def state_dict(self) -> dict[str, Any]:
        return {"num_in_a_row": self.num_in_a_row, "counts": dict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_in_a_row = int(state["num_in_a_row"])
        self.counts = Counter(state["counts"])


@dataclass
class SolvedPrompts:
    """Prompts whose groups were fully solved ``times`` times in a row are retired from the draw."""

    times: int
    solved_reward: float = 1.0
    streaks: dict[str, int] = field(default_factory=dict)

    def observe(self, prompt: str, rewards: Sequence[float]) -> bool:
        """Take a group's rewards in; True when the prompt is now retired."""
        solved = all(reward >= self.solved_reward for reward in rewards)
        self.streaks[prompt] = self.streaks.get(prompt, 0) + 1 if solved else 0
        return self.is_retired(prompt)

    def is_retired(self, prompt: str) -> bool:
        return self.streaks.get(prompt, 0) >= self.times

    def state_dict(self) -> dict[str, int]:
        return dict(self.streaks)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.streaks = {prompt: int(streak) for prompt, streak in state.items()}


def group_metrics(groups: Sequence[Sequence[float]], *, solved_reward: float = 1.0) -> dict[str, float]:
    """Shares of a batch's groups (each given by its rewards): ``batch/solve_none``, ``solve_all``,
    ``without_adv_ratio`` (no signal at all), ``solve_partly``. Empty without groups."""
    if not groups:
        return {}
    num = len(groups)
    none = sum(all(reward <= 0 for reward in rewards) for rewards in groups)
    every = sum(all(reward >= solved_reward for reward in rewards) for rewards in groups)
    return {
        "batch/solve_none": none / num,
        "batch/solve_all": every / num,
        "batch/solve_partly": (num - none - every) / num,
        "batch/without_adv_ratio": sum(not has_signal(rewards) for rewards in groups) / num,
    }
