"""Whether memory, descriptors and threads stay flat: samples of processes, and slopes within their lives."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import psutil


@dataclass(frozen=True)
class Sample:
    """One look at a process. `age_s` is counted from its start."""

    name: str
    pid: int
    age_s: float
    rss_mb: float
    num_fds: int
    num_threads: int


def take(name: str, pid: int, *, age_s: float) -> Sample | None:
    """A sample, or None when the process has just gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            rss_mb = process.memory_info().rss / 2**20
            return Sample(name, pid, age_s, rss_mb, process.num_fds(), process.num_threads())
    except psutil.Error:
        return None


def slope_per_h(samples: list[Sample], field: str, *, warm_up_s: float, min_life_s: float = 0.0) -> float:
    """Growth of `field` per hour: least squares with one slope for all lives and a level for each life.

    Only samples older than `warm_up_s` count, from lives with at least five of them that span `min_life_s`; 0 when
    there are none.
    """
    lives: defaultdict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.age_s >= warm_up_s:
            lives[sample.name, sample.pid].append(sample)
    numerator = denominator = 0.0
    for life in lives.values():
        ages = np.asarray([sample.age_s for sample in life])
        if len(life) >= 5 and np.ptp(ages) >= min_life_s:
            values = np.asarray([getattr(sample, field) for sample in life])
            numerator += float(np.sum((ages - ages.mean()) * (values - values.mean())))
            denominator += float(np.sum((ages - ages.mean()) ** 2))
    return 3600.0 * numerator / denominator if denominator > 0.0 else 0.0
