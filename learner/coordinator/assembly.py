"""Which groups make the next batch: the oldest first (design.md, invariant 3).

The batch is the first B complete groups in lease order. An incomplete older group holds it back, so that long answers
are not crowded out by short ones, but only while waiting can help: until a lease of it has expired, and until it is
older than eta (its oldest tokens would be masked either way).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from learner.coordinator.records import Group


@dataclass
class Choice:
    """`groups` is the batch when complete, else empty; `held_by` are the incomplete groups it waits for;
    `num_complete` counts complete groups in line."""

    groups: list[Group] = field(default_factory=list)
    held_by: list[Group] = field(default_factory=list)
    num_complete: int = 0


def holds(group: Group, *, policy_version: int, max_staleness: int) -> bool:
    """Whether an incomplete group holds back younger ones."""
    if group.overdue:
        return False
    oldest = group.min_version
    return oldest is None or oldest >= policy_version - max_staleness


def choose_batch(groups: Iterable[Group], *, size: int, policy_version: int, max_staleness: int) -> Choice:
    """The next batch out of `groups` (in lease order; those already in a batch are passed over)."""
    choice = Choice()
    chosen: list[Group] = []
    for group in groups:
        if group.batch_id is not None:
            continue
        if group.complete:
            choice.num_complete += 1
            if len(chosen) < size:
                chosen.append(group)
        elif len(chosen) < size and holds(group, policy_version=policy_version, max_staleness=max_staleness):
            choice.held_by.append(group)
    if len(chosen) == size and not choice.held_by:
        choice.groups = chosen
    return choice


def overtaken(groups: Iterable[Group], *, by: float) -> list[Group]:
    """Incomplete groups with at least `by` complete younger groups: the next batch waits, or will wait, for them."""
    waiting = [group for group in groups if group.batch_id is None]
    younger = sum(group.complete for group in waiting)
    found: list[Group] = []
    for group in waiting:
        if younger < by:
            break
        if group.complete:
            younger -= 1
        else:
            found.append(group)
    return found
