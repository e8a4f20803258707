"""What the daemon does with trajectories, apart from sockets, signals and processes.

    received -> ground truth -> judged -> sent to the coordinator -> its acknowledgement relayed to the sender

A trajectory leaves only with the coordinator's acknowledgement: until then its sender holds it too. A second delivery
of one that is still here (its sender ran out of patience) joins the first and is acknowledged with it. While the
coordinator is away, judged trajectories wait, bounded by rewardd.max_queue, and senders are told to wait.
"""

import logging
from collections import Counter, deque
from collections.abc import Mapping
from time import monotonic
from typing import Protocol

import msgspec
import numpy as np

from protocol.config.services import RewarddSection
from protocol.errors import FrameError, MessageTooLarge
from protocol.logs import event
from protocol.messages import (
    AnyBody,
    Busy,
    GroundTruthRequest,
    GroundTruths,
    Refused,
    ScoredTrajectory,
    Trajectory,
    TrajectoryAck,
    Verdict,
)
from protocol.sockets import Peer, Received
from rewardd.ground_truth import GroundTruthCache
from rewardd.judge import Judge
from rewardd.scorers import Outcome, Task
from rewardd.shaping import shape
from rewardd.validation import problem_of

log = logging.getLogger(__name__)

MIN_RETRY_S = 0.1
MAX_RETRY_S = 5.0


class Outgoing(Protocol):
    """The sockets as the service sees them."""

    def answer(self, peer: Peer, body: AnyBody, *, reply_to: int) -> None:
        """To a sender of trajectories."""

    def ask(self, token: int, body: AnyBody, *, arrays: Mapping[str, np.ndarray] | None) -> None:
        """To the coordinator; what became of it comes back through `RewardService.on_answer` or `on_failure`."""


class _Held(msgspec.Struct):
    """A trajectory between its receipt and its acknowledgement."""

    trajectory: Trajectory
    arrays: dict[str, np.ndarray]
    senders: list[tuple[Peer, int]]
    since: float
    verdict: Verdict | None = None


class RewardService:
    """Used by one thread.

    Args:
        name: of this daemon.
        outgoing: where answers and questions go.
    """

    def __init__(self, section: RewarddSection, *, name: str, judge: Judge, outgoing: Outgoing) -> None:
        self.counts: Counter[str] = Counter()
        self.last_progress = monotonic()
        self.accepting = True
        self._section = section
        self._name = name
        self._judge = judge
        self._out = outgoing
        self._truths = GroundTruthCache(overrides=section.scorers)
        self._held: dict[int, _Held] = {}
        self._tickets: dict[tuple[int, int, int], int] = {}
        self._by_prompt: dict[str, list[int]] = {}
        self._asked: dict[int, list[str]] = {}
        self._unsent: deque[int] = deque()
        self._retry_at = 0.0
        self._next_ticket = 0
        self._recent_s = 0.1

    # ------------------------------------------------------------ trajectories

    def on_trajectory(self, received: Received) -> None:
        """Take a trajectory, or tell its sender to wait."""
        trajectory, peer, msg_id = received.body, received.peer, received.envelope.msg_id
        assert isinstance(trajectory, Trajectory)
        slot = (trajectory.group_id, trajectory.slot, trajectory.attempt)
        ticket = self._tickets.get(slot)
        if ticket is not None:
            self.counts["joined"] += 1
            self._held[ticket].senders.append((peer, msg_id))
            return
        if not self.accepting or len(self._held) >= self._section.max_queue:
            self.counts["busy"] += 1
            reason = "queue full (rewardd.max_queue)" if self.accepting else "stopping"
            retry_s = min(MAX_RETRY_S, max(MIN_RETRY_S, self._recent_s))
            self._out.answer(peer, Busy(retry_after_s=retry_s, reason=reason), reply_to=msg_id)
            return
        self.counts["received"] += 1
        self._next_ticket += 1
        ticket = self._next_ticket
        held = _Held(trajectory=trajectory, arrays=received.arrays, senders=[(peer, msg_id)], since=monotonic())
        self._held[ticket], self._tickets[slot] = held, ticket
        problem = problem_of(trajectory, received.arrays)
        if problem:
            event(log, logging.WARNING, "trajectory rejected", sender=peer.name, slot=slot, problem=problem)
            self._on_outcome(ticket, Outcome(kind="rejected", reason="malformed", detail=problem), scorer="")
            return
        self._score(ticket, held)

    def _score(self, ticket: int, held: _Held) -> None:
        prompt_id = held.trajectory.prompt_id
        routed = self._truths.get(prompt_id)
        if routed is None:
            self._truths.want(prompt_id)
            self._by_prompt.setdefault(prompt_id, []).append(ticket)
            return
        if routed.problem:
            event(log, logging.ERROR, "ground truth unusable", prompt=prompt_id, problem=routed.problem)
            self._on_outcome(ticket, Outcome(kind="rejected", reason="bad_ground_truth"), scorer="")
            return
        task = Task(
            scorer=routed.scorer, response=held.trajectory.response_text, truth=routed.truth, extra=routed.extra
        )
        self._judge.submit(ticket, task)

    def _on_outcome(self, ticket: int, outcome: Outcome, *, scorer: str) -> None:
        held = self._held[ticket]
        held.verdict = shape(
            outcome,
            purpose=held.trajectory.purpose,
            scorer=scorer,
            section=self._section.shaping,
            num_tokens=held.trajectory.num_response_tokens,
        )
        self.counts[f"verdict_{outcome.kind}"] += 1
        self.last_progress = monotonic()
        self._unsent.append(ticket)

    # ------------------------------------------------------------ the loop

    def turn(self, *, coordinator_up: bool) -> None:
        """Collect outcomes, ask for ground truths, send what is judged."""
        for ticket, outcome in self._judge.turn():
            held = self._held[ticket]
            routed = self._truths.get(held.trajectory.prompt_id)
            self._on_outcome(ticket, outcome, scorer=routed.scorer if routed is not None else "")
        if not coordinator_up or monotonic() < self._retry_at:
            return
        prompt_ids = self._truths.next_request()
        if prompt_ids:
            self._next_ticket += 1
            self._asked[self._next_ticket] = prompt_ids
            self._out.ask(self._next_ticket, GroundTruthRequest(prompt_ids=prompt_ids), arrays=None)
        while self._unsent:
            self._send(self._unsent.popleft())

    def _send(self, ticket: int) -> None:
        held = self._held[ticket]
        assert held.verdict is not None
        body = ScoredTrajectory(trajectory=held.trajectory, verdict=held.verdict, rewardd=self._name)
        try:
            self._out.ask(ticket, body, arrays=held.arrays)
        except (FrameError, MessageTooLarge) as error:
            self._acknowledge(ticket, refusal_of(held, str(error)))

    def wait_s(self) -> float:
        """Longest time until `turn` has to be called without news."""
        retry_s = self._retry_at - monotonic()
        return min(self._judge.wait_s(), retry_s if retry_s > 0.0 else 1.0)

    def on_answer(self, token: int, body: AnyBody) -> None:
        """The coordinator answered."""
        prompt_ids = self._asked.pop(token, None)
        if prompt_ids is not None:
            if isinstance(body, GroundTruths):
                self._on_truths(prompt_ids, body)
            else:
                self._put_off(prompt_ids, body)
            return
        held = self._held.get(token)
        if held is None:
            return
        if isinstance(body, TrajectoryAck):
            self._acknowledge(token, body)
        elif isinstance(body, Busy):
            self._unsent.append(token)
            self._retry_at = monotonic() + body.retry_after_s
        else:
            reason = body.reason if isinstance(body, Refused) else f"unexpected answer {type(body).__name__}"
            event(log, logging.ERROR, "coordinator refused a trajectory", reason=reason)
            self._acknowledge(token, refusal_of(held, reason))

    def on_failure(self, token: int, error: BaseException) -> None:
        """The coordinator did not answer: everything is tried again once it is back."""
        self.counts["resent"] += 1
        self._retry_at = monotonic() + MIN_RETRY_S
        prompt_ids = self._asked.pop(token, None)
        if prompt_ids is not None:
            self._truths.ask_again(prompt_ids)
        elif token in self._held:
            self._unsent.append(token)
        event(log, logging.WARNING, "no answer from the coordinator", error=str(error))

    def _put_off(self, prompt_ids: list[str], body: AnyBody) -> None:
        self._truths.ask_again(prompt_ids)
        self._retry_at = monotonic() + (body.retry_after_s if isinstance(body, Busy) else MAX_RETRY_S)
        event(log, logging.WARNING, "ground truths not to be had now", answer=type(body).__name__)

    def _on_truths(self, asked: list[str], body: GroundTruths) -> None:
        for prompt_id in self._truths.store(asked, body.items):
            for ticket in self._by_prompt.pop(prompt_id, []):
                event(log, logging.ERROR, "coordinator does not know the prompt", prompt=prompt_id)
                self._on_outcome(ticket, Outcome(kind="rejected", reason="unknown_prompt"), scorer="")
        for item in body.items:
            for ticket in self._by_prompt.pop(item.prompt_id, []):
                self._score(ticket, self._held[ticket])

    def _acknowledge(self, ticket: int, ack: TrajectoryAck) -> None:
        held = self._held.pop(ticket)
        del self._tickets[held.trajectory.group_id, held.trajectory.slot, held.trajectory.attempt]
        for peer, msg_id in held.senders:
            self._out.answer(peer, ack, reply_to=msg_id)
        self.counts[f"ack_{ack.status}"] += 1
        self.last_progress = monotonic()
        self._recent_s = 0.9 * self._recent_s + 0.1 * (self.last_progress - held.since)

    # ------------------------------------------------------------ state

    @property
    def num_held(self) -> int:
        """Trajectories not yet acknowledged."""
        return len(self._held)

    @property
    def num_unsent(self) -> int:
        """Judged trajectories that wait for the coordinator."""
        return len(self._unsent)

    def metrics(self) -> dict[str, float]:
        """Counters and the depth and oldest age of the queue."""
        oldest = next(iter(self._held.values()), None)
        metrics = {f"rewardd/{name}": float(count) for name, count in self.counts.items()}
        metrics["rewardd/queue_depth"] = float(len(self._held))
        metrics["rewardd/queue_oldest_s"] = monotonic() - oldest.since if oldest is not None else 0.0
        return metrics | self._judge.metrics()


def refusal_of(held: _Held, reason: str) -> TrajectoryAck:
    """An acknowledgement of this daemon's own: the coordinator can't take this trajectory."""
    slot = held.trajectory
    return TrajectoryAck(group_id=slot.group_id, slot=slot.slot, attempt=slot.attempt, status="refused", reason=reason)
