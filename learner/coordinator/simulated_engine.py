"""A simulated generator: an engine that takes steps, each of which gives every running request one token."""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.coordinator.simulation_setup import SimulatedGenerator
from protocol import messages as m


@dataclass
class Request:
    """A request: `versions` of the tokens it began with; the rest is sampled from step `begun` on."""

    lease: m.Lease
    slot: int
    length: int
    begun: float
    since: float
    versions: NDArray[np.int32]

    @property
    def last_step(self) -> float:
        return self.begun + self.length - len(self.versions)


class Engine:
    """Counts steps, at a rate that depends on how many requests run; `history` holds at which step it took over which
    version."""

    def __init__(self, setup: SimulatedGenerator, key: str) -> None:
        self.setup = setup
        self.key = key
        self.version = 0
        self.running: dict[tuple[int, int, int], Request] = {}
        self.history: tuple[list[float], list[int]] = ([0.0], [0])
        self.asking = False  # a request is under way, or will be after the retry interval
        self.steps = 0.0
        self.num_changes = 0
        self.idle_s = self.empty_s = self.changed = 0.0

    def book(self, now: float) -> None:
        """Adds the time since the last call to steps and idle counts; to be called before anything changes."""
        span = now - self.changed
        if self.running:
            self.steps += span * self.setup.steps_per_s(len(self.running))
        self.idle_s += span * (not self.running)
        self.empty_s += span * (1.0 - len(self.running) / self.setup.num_slots)
        self.changed = now

    def take_over(self, version: int) -> None:
        """Tokens from here on are of this version."""
        self.version = version
        self.history[0].append(self.steps)
        self.history[1].append(version)

    def seconds_to_next_end(self) -> float:
        """From the last booking until the first running request is done."""
        steps = min(request.last_step for request in self.running.values()) - self.steps
        return max(0.0, steps) / self.setup.steps_per_s(len(self.running))

    def ended(self) -> list[tuple[int, int, int]]:
        """Requests that are done by now."""
        return [key for key, request in self.running.items() if request.last_step <= self.steps + 1e-6]

    def sampled(self, request: Request) -> NDArray[np.int32]:
        """Versions of the tokens sampled so far, those it began with included."""
        num_new = max(0, int(min(request.last_step, self.steps) - request.begun + 1e-5))
        steps = request.begun + np.arange(1, num_new + 1)
        at, versions = self.history
        first = max(0, bisect_right(at, request.begun) - 1)
        index = np.searchsorted(np.asarray(at[first:]), steps, side="right") - 1
        new = np.asarray(versions[first:], dtype="<i4")[np.maximum(index, 0)]
        return np.concatenate([request.versions, new]).astype("<i4")
