"""The reward daemon's service without sockets or processes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from protocol.config.services import RewarddSection
from protocol.messages import AnyBody, Busy
from protocol.sockets import Peer
from rewardd.judge import Judge
from rewardd.service import RewardService


class Nobody:
    """Sockets whose other ends are not there."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def answer(self, peer: Peer, body: AnyBody, *, reply_to: int) -> None:
        raise AssertionError(f"nobody to answer {body}")

    def ask(self, token: int, body: AnyBody, *, arrays: Mapping[str, np.ndarray] | None) -> None:
        self.asked.append(token)


def test_b33_waiting_for_a_coordinator_that_is_away_costs_no_cpu(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rewardd.service.monotonic", lambda: now[0])
    service = RewardService(RewarddSection(), name="r", judge=Judge(RewarddSection()), outgoing=Nobody())
    service._truths.want("p")
    service.turn(coordinator_up=True)
    refusal: Any = Busy(retry_after_s=0.5, reason="later")
    service.on_answer(1, refusal)
    assert 0.0 < service.wait_s() <= 0.5
    now[0] += 10.0  # the retry is due, and the coordinator is gone
    service.turn(coordinator_up=False)
    assert service.wait_s() >= 0.25
