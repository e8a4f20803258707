"""When a new group may be leased, and how new the weights must be for it.

    admitted groups = leased + waiting + in the batch being trained <= (eta + 1) * B

Nothing cumulative is counted: a group that ends in any way (trained, filtered, retired, a skipped update) gives its
place back. A group with `rank` groups before it is trained in the batch rank // B from now, thus at version
v_train <= v + rank // B, and its tokens must be sampled at >= v_train - eta:

    min_version = max(0, v + rank // B - eta)

Worked example, B = 2, eta = 1, v = 5: four groups are admitted; the first two may be sampled at version 4, the next
two at version 5. With eta = 0 a group may be sampled at version 5 only: synchronous.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Admission:
    """`max_staleness` is eta, `groups_per_batch` is B."""

    max_staleness: int
    groups_per_batch: int

    @property
    def max_groups(self) -> int:
        """Most groups that are in flight at one time."""
        return (self.max_staleness + 1) * self.groups_per_batch

    def admits(self, num_groups: int) -> bool:
        """Whether one more group may be leased when `num_groups` are leased, waiting or being trained."""
        return num_groups < self.max_groups

    def min_version(self, rank: int, *, policy_version: int) -> int:
        """Oldest version that may sample a group which has `rank` groups before it."""
        return max(0, policy_version + rank // self.groups_per_batch - self.max_staleness)

    def train_version(self, rank: int, *, policy_version: int) -> int:
        """Version at which that group is trained, if every batch until then advances the version."""
        return policy_version + rank // self.groups_per_batch
