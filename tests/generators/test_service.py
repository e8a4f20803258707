"""A generator against a coordinator and a reward daemon over real sockets, with scripted tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np

from generators.environments import Episode, Observation
from protocol.errors import ExitStatus
from protocol.messages import PartialAnswer, SlotRef
from protocol.metrics import unregistered
from tests.generators.support import FakeRun, make_lease
from tests.support.wait import wait_until

Start = Callable[..., Any]


def test_every_slot_is_answered_once_and_acknowledged(fake_run: FakeRun, start_scripted: Start) -> None:
    fake_run.leases = [(make_lease(group_id), {}) for group_id in range(1, 7)]
    start_scripted()
    wait_until(lambda: len(fake_run.trajectories) >= 24, what="24 trajectories")
    keys = [(t.body.group_id, t.body.slot, t.body.attempt) for t in fake_run.trajectories]
    assert sorted(keys) == [(group_id, slot, 1) for group_id in range(1, 7) for slot in range(4)]
    for received in fake_run.trajectories:
        body, arrays = received.body, received.arrays
        assert body.generator == "g0" and body.finish_reason in ("stop", "length")
        assert arrays["token_ids"][: body.num_prompt_tokens].tolist() == [70, 71, 72, body.group_id]
        sizes = {name: arrays[name].size for name in ("logp_behaviour", "versions", "loss_mask")}
        assert set(sizes.values()) == {body.num_response_tokens}
        assert (arrays["logp_behaviour"] <= 0).all() and (arrays["versions"] == 0).all()


def test_b41_cancelled_slot_is_handed_back_and_never_delivered(fake_run: FakeRun, start_scripted: Start) -> None:
    slow = {"tokens_per_s": 50.0, "length": "constant", "mean_tokens": 200}
    fake_run.leases = [(make_lease(3, slots=2, max_tokens=500), {})]
    start_scripted(engine_args=slow)
    wait_until(lambda: any(p.num_tokens > 3 for beat in fake_run.heartbeats for p in beat.progress), what="progress")
    fake_run.cancel = [SlotRef(group_id=3, slot=1, attempt=1)]
    wait_until(lambda: fake_run.handed_back, what="hand-back")
    body, arrays = fake_run.handed_back[0].body, fake_run.handed_back[0].arrays
    assert (body.group_id, body.slots, body.reason) == (3, [1], "cancelled")
    tokens = arrays["partial/3/1/token_ids"]
    assert tokens.size == body.partial[0].num_tokens > 3
    assert arrays["partial/3/1/logp_behaviour"].size == arrays["partial/3/1/versions"].size == tokens.size
    assert not fake_run.trajectories


def test_partial_answer_is_continued_token_by_token(fake_run: FakeRun, start_scripted: Start) -> None:
    lease = make_lease(5, slots=1, attempt=2, max_tokens=64)
    earlier = {
        "partial/5/0/token_ids": np.arange(10, 20, dtype=np.int32),
        "partial/5/0/logp_behaviour": -np.arange(10, dtype=np.float32),
        "partial/5/0/versions": np.zeros(10, dtype=np.int32),
        "partial/5/0/loss_mask": np.ones(10, dtype=np.uint8),
    }
    partial = [PartialAnswer(group_id=5, slot=0, num_tokens=10)]
    continued = type(lease)(**{f: getattr(lease, f) for f in lease.__struct_fields__} | {"partial": partial})
    fake_run.leases = [(continued, earlier)]
    start_scripted()
    wait_until(lambda: fake_run.trajectories, what="trajectory")
    body, arrays = fake_run.trajectories[0].body, fake_run.trajectories[0].arrays
    assert arrays["token_ids"][4:14].tolist() == list(range(10, 20))
    assert arrays["logp_behaviour"][:10].tolist() == [-float(i) for i in range(10)]
    assert body.num_response_tokens > 10 and body.sampling == lease.sampling


class Adds:
    """An environment that says one thing after the first turn."""

    def __init__(self, *, text: str) -> None:
        self._text = text

    async def respond(self, episode: Episode) -> Observation | None:
        return Observation(text=self._text, role="user") if len(episode.turns) == 1 else None

    async def close(self) -> None:
        return None


def test_answers_of_several_turns_arrive_with_their_masks(fake_run: FakeRun, start_scripted: Start) -> None:
    fake_run.leases = [(make_lease(6, slots=4, max_tokens=200), {})]
    start_scripted(environment={"name": f"{__name__}:Adds", "options": {"text": "go on"}})
    wait_until(lambda: len(fake_run.trajectories) >= 4, what="4 trajectories")
    for received in fake_run.trajectories:
        mask = received.arrays["loss_mask"]
        assert mask[0] == mask[-1] == 1 and np.flatnonzero(np.diff(mask.astype(int))).size == 2
        assert received.body.response_text.count("go on") == 1
        assert (received.arrays["logp_behaviour"][mask == 0] == 0).all()


def test_drain_hands_back_unfinished_answers_with_their_tokens(fake_run: FakeRun, start_scripted: Start) -> None:
    fake_run.leases = [(make_lease(4, slots=2, max_tokens=5000), {})]
    generator = start_scripted(engine_args={"tokens_per_s": 50.0, "length": "constant", "mean_tokens": 4000})
    wait_until(lambda: any(p.num_tokens > 3 for beat in fake_run.heartbeats for p in beat.progress), what="progress")
    fake_run.command = "drain"
    assert generator.wait() is ExitStatus.STOPPED
    assert sorted(slot for received in fake_run.handed_back for slot in received.body.slots) == [0, 1]
    assert all(received.body.partial[0].num_tokens > 3 for received in fake_run.handed_back)


def test_finished_run_ends_with_status_finished(fake_run: FakeRun, start_scripted: Start) -> None:
    generator = start_scripted()
    wait_until(lambda: any(beat.state == "serving" for beat in fake_run.heartbeats), what="serving")
    fake_run.command = "stop"
    assert generator.wait() is ExitStatus.FINISHED


def test_b12_dead_engine_ends_the_generator_with_its_own_status(fake_run: FakeRun, start_scripted: Start) -> None:
    generator = start_scripted(engine_args={"die_after_s": 0.5})
    assert generator.wait() is ExitStatus.ENGINE_FAILED


def test_b14_no_tokens_with_work_pending_is_unhealthy(fake_run: FakeRun, start_scripted: Start) -> None:
    fake_run.leases = [(make_lease(1, max_tokens=5000), {})]
    generator = start_scripted(
        engine_args={"stall_after_s": 0.3, "length": "constant", "mean_tokens": 4000}, no_token_s=1.0
    )
    assert generator.wait() is ExitStatus.UNHEALTHY


def test_b14_idle_without_work_is_healthy_and_says_what_it_waits_for(fake_run: FakeRun, start_scripted: Start) -> None:
    generator = start_scripted(no_token_s=0.5)
    wait_until(lambda: sum(beat.waiting_for == "staleness" for beat in fake_run.heartbeats) > 12, what="idle beats")
    assert generator.thread.is_alive()
    last = fake_run.heartbeats[-1]
    assert abs(sum(last.idle_fractions.values()) - 1.0) < 1e-6
    assert "waiting for staleness" in last.idle_fractions
    assert {"generator/running", "generator/slots"} <= last.metrics.keys() and not unregistered(last.metrics)


def test_b17_memory_limit_drains_and_says_so(fake_run: FakeRun, start_scripted: Start) -> None:
    generator = start_scripted(memory_limit_gb=0.001)
    assert generator.wait() is ExitStatus.MEMORY_LIMIT


def test_busy_and_silent_reward_daemons_lose_nothing(fake_run: FakeRun, start_scripted: Start) -> None:
    fake_run._busy = 3
    fake_run.mute_rewardd = True
    fake_run.leases = [(make_lease(group_id, slots=2), {}) for group_id in (1, 2)]
    start_scripted()
    wait_until(lambda: any(b.metrics.get("generator/undelivered", 0) == 4 for b in fake_run.heartbeats), what="waiting")
    fake_run.mute_rewardd = False
    wait_until(lambda: len(fake_run.trajectories) >= 4, what="4 trajectories")
    assert {(t.body.group_id, t.body.slot) for t in fake_run.trajectories} == {(1, 0), (1, 1), (2, 0), (2, 1)}


def test_lease_above_the_own_version_is_handed_back(fake_run: FakeRun, start_scripted: Start) -> None:
    fake_run.leases = [(make_lease(9, slots=1, min_version=3), {})]
    start_scripted()
    wait_until(lambda: fake_run.handed_back, what="hand-back")
    assert "version 3" in fake_run.handed_back[0].body.reason
    assert not fake_run.trajectories


def test_b50_tokens_carry_the_version_that_sampled_them(fake_run: FakeRun, start_scripted: Start) -> None:
    fake_run.leases = [(make_lease(2, slots=1, max_tokens=200), {})]
    start_scripted(engine_args={"tokens_per_s": 80.0, "length": "constant", "mean_tokens": 100})
    wait_until(lambda: any(p.num_tokens > 10 for beat in fake_run.heartbeats for p in beat.progress), what="progress")
    fake_run.published_version = 2
    wait_until(lambda: fake_run.trajectories, what="trajectory")
    versions = fake_run.trajectories[0].arrays["versions"]
    assert set(versions.tolist()) == {0, 2} and (np.diff(versions) >= 0).all()
