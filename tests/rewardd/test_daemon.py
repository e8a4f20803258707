"""The daemon as a process, over real sockets."""

import asyncio
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from generators.delivery import Delivery
from protocol.config.services import TransportSection
from protocol.errors import ExitStatus, PeerUnreachable
from protocol.messages import Busy, RewarddAddress, ScoredTrajectory, TrajectoryAck
from protocol.metrics import unregistered
from protocol.sockets import Client, make_hello
from rewardd.main import run
from tests.rewardd.support import TRANSPORT, children_of, daemon, load, python, trajectory, wait_gone, write_config
from tests.support.fake_coordinator import FakeCoordinator, ground_truth
from tests.support.wait import wait_until

TRUTHS = {
    "p0": ground_truth("p0", "42"),
    "p1": ground_truth("p1", '["1/2"]'),
    "bad": ground_truth("bad", None),
}


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    fake = FakeCoordinator(transport=TransportSection(**TRANSPORT), truths=dict(TRUTHS))
    yield fake
    fake.close()


def connect(coordinator: FakeCoordinator, *, daemon_name: str = "rewardd-0") -> Client:
    wait_until(lambda: daemon_name in coordinator.hellos, deadline_s=90, what=f"hello of {daemon_name}")
    address = str(coordinator.hellos[daemon_name].attributes["address"])
    client = Client(address, hello=make_hello("generator", name="generator-0"), transport=TransportSection(**TRANSPORT))
    client.start(deadline_s=10)
    return client


def deliver(client: Client, *args, **kwargs) -> TrajectoryAck | Busy:
    body, arrays = trajectory(*args, **kwargs)
    answer = client.request(body, arrays=arrays, deadline_s=20).result(30).body
    assert isinstance(answer, TrajectoryAck | Busy)
    return answer


def verdict_of(coordinator: FakeCoordinator, group_id: int):
    bodies = [r.body for r in coordinator.scored if r.body.trajectory.group_id == group_id]
    assert len(bodies) == 1
    return bodies[0].verdict


def test_trajectories_are_judged_and_acknowledged_end_to_end(tmp_path: Path, coordinator: FakeCoordinator) -> None:
    config = write_config(tmp_path, coordinator=coordinator.address, shaping={"format_bonus": 0.1})
    with daemon(config) as process:
        client = connect(coordinator)
        assert deliver(client, 1, "p0", "so \\boxed{42}").status == "accepted"
        assert deliver(client, 2, "p0", "so \\boxed{41}").status == "accepted"
        assert deliver(client, 3, "p1", "so \\boxed{0.5}", purpose="eval").status == "accepted"
        assert deliver(client, 1, "p0", "so \\boxed{42}").status == "duplicate"
        scored = coordinator.scored[0].body
        assert isinstance(scored, ScoredTrajectory) and scored.rewardd == "rewardd-0"
        assert (scored.verdict.kind, scored.verdict.components) == ("correct", {"correctness": 1.0, "format": 0.1})
        assert scored.verdict.score == pytest.approx(1.1)
        assert verdict_of(coordinator, 2).kind == "wrong"
        assert verdict_of(coordinator, 3).score == 1.0
        sent = trajectory(1, "p0", "")[1]
        for name, array in coordinator.scored[0].arrays.items():
            np.testing.assert_array_equal(array, sent[name], strict=True)
        assert coordinator.requested == {"p0": 1, "p1": 1}
        workers = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == ExitStatus.STOPPED
        wait_gone(workers)
        client.close(deadline_s=0)


def test_malformed_aborted_and_unknown_are_rejected_never_scored(tmp_path: Path, coordinator: FakeCoordinator) -> None:
    with daemon(write_config(tmp_path, coordinator=coordinator.address)):
        client = connect(coordinator)
        body, arrays = trajectory(1, "p0", "\\boxed{42}")
        client.request(body, arrays=arrays | {"versions": arrays["versions"][:-1]}, deadline_s=20).result(30)
        nan = arrays["logp_behaviour"].copy()
        nan[2] = np.nan
        body, _ = trajectory(2, "p0", "\\boxed{42}")
        client.request(body, arrays=arrays | {"logp_behaviour": nan}, deadline_s=20).result(30)
        deliver(client, 3, "p0", "\\boxed{42}", finish_reason="aborted")
        deliver(client, 4, "nowhere", "\\boxed{42}")
        deliver(client, 5, "bad", "\\boxed{42}")
        reasons = [verdict_of(coordinator, group).reason for group in range(1, 6)]
        assert reasons == ["malformed", "malformed", "malformed", "unknown_prompt", "bad_ground_truth"]
        assert {verdict_of(coordinator, group).kind for group in range(1, 6)} == {"rejected"}
        client.close(deadline_s=0)


def test_b24_training_and_evaluation_follow_their_own_rules(tmp_path: Path, coordinator: FakeCoordinator) -> None:
    shaping = {"correct": 2.0, "wrong": -1.0, "format_bonus": 0.5, "length_penalty": 1.0, "length_to": 5}
    with daemon(write_config(tmp_path, coordinator=coordinator.address, shaping=shaping)):
        client = connect(coordinator)
        for group_id, purpose in enumerate(["train", "eval"]):
            deliver(client, group_id, "p0", "so \\boxed{42}", purpose=purpose, num_response=5, metrics={"turns": 2.0})
        training, evaluation = verdict_of(coordinator, 0), verdict_of(coordinator, 1)
        assert training.score == 1.5 and training.components == {"correctness": 1.0, "format": 0.5, "length": -1.0}
        assert evaluation.score == 1.0 and evaluation.components == {"correctness": 1.0}
        assert [received.body.trajectory.metrics for received in coordinator.scored] == [{"turns": 2.0}] * 2
        client.close(deadline_s=0)


def test_several_daemons_share_the_load_and_one_that_dies_loses_nothing(
    tmp_path: Path, coordinator: FakeCoordinator
) -> None:
    config = write_config(tmp_path, coordinator=coordinator.address)
    names = ["rewardd-0", "rewardd-1"]
    with daemon(config, name=names[0]), daemon(config, name=names[1]) as second:
        wait_until(lambda: set(names) <= set(coordinator.hellos), deadline_s=90, what="both daemons")
        statuses = asyncio.run(deliver_all(coordinator, names, num=40, when_both_work=second.kill))
    # An answer whose daemon died between its score and its acknowledgement comes again: a duplicate, counted once.
    assert set(statuses) <= {"accepted", "duplicate"}
    scored = {(received.body.trajectory.group_id, received.body.trajectory.slot) for received in coordinator.scored}
    assert len(scored) == len(statuses)
    by = Counter(received.body.rewardd for received in coordinator.scored)
    assert set(by) == set(names)
    assert {received.body.verdict.kind for received in coordinator.scored} == {"correct"}


async def deliver_all(
    coordinator: FakeCoordinator, names: list[str], *, num: int, when_both_work: Callable[[], None]
) -> list[str]:
    """Statuses of the answers that a generator's sender brings to the daemons: some until each has scored one, then
    `num` more at once."""
    hello = make_hello("generator", name="generator-0")
    delivery = Delivery(hello=hello, transport=TransportSection(**TRANSPORT))
    addresses = [RewarddAddress(name=n, address=str(coordinator.hellos[n].attributes["address"])) for n in names]
    delivery.follow(addresses)

    async def one(number: int) -> str:
        body, arrays = trajectory(number, "p0", "so \\boxed{42}")
        return (await delivery.deliver(body, arrays)).status

    statuses: list[str] = []
    try:
        while len({received.body.rewardd for received in coordinator.scored}) < len(names):
            assert len(statuses) < 5000
            statuses.append(await one(len(statuses)))
        later = [asyncio.create_task(one(len(statuses) + number)) for number in range(num)]
        await asyncio.sleep(0)
        when_both_work()
        return [*statuses, *await asyncio.gather(*later)]
    finally:
        await delivery.close()


def test_b24_masked_nan_extra_arrays_and_absent_options_pass(tmp_path: Path, coordinator: FakeCoordinator) -> None:
    with daemon(write_config(tmp_path, coordinator=coordinator.address)):
        client = connect(coordinator)
        body, arrays = trajectory(1, "p0", "\\boxed{42}")
        mask, logp = arrays["loss_mask"].copy(), arrays["logp_behaviour"].copy()
        mask[1], logp[1] = 0, np.nan
        extra = {"loss_mask": mask, "logp_behaviour": logp, "notes/extra": np.arange(6.0).reshape(2, 3)}
        ack = client.request(body, arrays=arrays | extra, deadline_s=20).result(30).body
        assert ack.status == "accepted"
        assert verdict_of(coordinator, 1).kind == "correct"
        np.testing.assert_array_equal(coordinator.scored[0].arrays["notes/extra"], extra["notes/extra"], strict=True)
        client.close(deadline_s=0)


def test_full_queue_pushes_back_and_a_lost_coordinator_is_waited_for(
    tmp_path: Path, coordinator: FakeCoordinator
) -> None:
    with daemon(write_config(tmp_path, coordinator=coordinator.address, max_queue=2)):
        client = connect(coordinator)
        deliver(client, 1, "p0", "\\boxed{42}")
        coordinator.answer_scored = False
        waiting = []
        for group_id in (2, 3):
            body, arrays = trajectory(group_id, "p0", "\\boxed{42}")
            waiting.append(client.request(body, arrays=arrays, deadline_s=60))
        wait_until(lambda: coordinator.heartbeats["rewardd-0"].metrics.get("rewardd/queue_depth") == 2)
        assert not unregistered(coordinator.heartbeats["rewardd-0"].metrics)
        assert isinstance(deliver(client, 4, "p0", "\\boxed{42}"), Busy)
        again, arrays = trajectory(2, "p0", "\\boxed{42}")
        waiting.append(client.request(again, arrays=arrays, deadline_s=60))
        coordinator.close()
        fresh = FakeCoordinator(coordinator.address, transport=TransportSection(**TRANSPORT), truths=dict(TRUTHS))
        try:
            statuses = [future.result(60).body.status for future in waiting]
            assert statuses == ["accepted"] * 3
            assert sorted(r.body.trajectory.group_id for r in fresh.scored) == [2, 3]
        finally:
            client.close(deadline_s=0)
            fresh.close()


def test_b30_killed_daemon_leaves_nothing_and_its_successor_is_heard(
    tmp_path: Path, coordinator: FakeCoordinator
) -> None:
    config = write_config(tmp_path, coordinator=coordinator.address)
    with daemon(config) as process:
        client = connect(coordinator)
        deliver(client, 1, "p0", "\\boxed{42}")
        workers = children_of(process.pid)
        assert workers
        coordinator.answer_scored = False
        body, arrays = trajectory(2, "p0", "\\boxed{42}")
        lost = client.request(body, arrays=arrays, deadline_s=30)
        wait_until(lambda: coordinator.heartbeats["rewardd-0"].metrics.get("rewardd/queue_depth") == 1)
        process.kill()
        with pytest.raises(PeerUnreachable):
            lost.result(40)
        wait_gone(workers)
        client.close(deadline_s=0)
    coordinator.answer_scored = True
    old = coordinator.hellos["rewardd-0"].incarnation if "rewardd-0" in coordinator.hellos else ""
    with daemon(config):
        wait_until(
            lambda: "rewardd-0" in coordinator.hellos and coordinator.hellos["rewardd-0"].incarnation != old,
            deadline_s=90,
        )
        client = connect(coordinator)
        assert deliver(client, 2, "p0", "\\boxed{42}").status == "accepted"
        client.close(deadline_s=0)


def test_the_end_of_the_run_ends_the_daemon_with_status_0(tmp_path: Path, coordinator: FakeCoordinator) -> None:
    with daemon(write_config(tmp_path, coordinator=coordinator.address)) as process:
        connect(coordinator).close(deadline_s=0)
        coordinator.command = "stop"
        assert process.wait(15) == ExitStatus.FINISHED


def test_b22_killed_worker_is_replaced_while_serving(tmp_path: Path, coordinator: FakeCoordinator) -> None:
    with daemon(write_config(tmp_path, coordinator=coordinator.address, math={"num_workers": 2})) as process:
        client = connect(coordinator)
        deliver(client, 1, "p0", "\\boxed{42}")
        nursery = psutil.Process(process.pid).children()[0]
        for worker in nursery.children():
            worker.kill()
        assert deliver(client, 2, "p0", "\\boxed{42.0}").status == "accepted"
        assert verdict_of(coordinator, 2).kind == "correct"
        client.close(deadline_s=0)


def test_b21_a_daemon_whose_known_pairs_come_out_wrong_never_serves(
    tmp_path: Path, coordinator: FakeCoordinator, plugin
) -> None:
    with daemon(write_config(tmp_path, coordinator=coordinator.address, scorers={"x": "liar"})) as process:
        assert process.wait(30) == ExitStatus.UNHEALTHY
    assert not coordinator.hellos


def test_b23_a_broken_scorer_gives_unjudged_over_the_wire(tmp_path: Path, coordinator: FakeCoordinator, plugin) -> None:
    with daemon(write_config(tmp_path, coordinator=coordinator.address, scorers={"test": "obedient"}, max_retries=1)):
        client = connect(coordinator)
        deliver(client, 1, "p0", "raise")
        deliver(client, 2, "p0", "fine")
        verdict = verdict_of(coordinator, 1)
        assert (verdict.kind, verdict.reason, verdict.scorer, verdict.components) == (
            "unjudged", "scorer_fault", "obedient", {},
        )  # fmt: skip
        assert verdict_of(coordinator, 2).kind == "correct"
        client.close(deadline_s=0)


def test_b33_a_frozen_coordinator_is_waited_for_and_said_so(tmp_path: Path) -> None:
    with (
        python("tests.support.fake_coordinator", "tcp://127.0.0.1:0") as coordinator_process,
        daemon(write_config(tmp_path, coordinator=coordinator_process.address)) as process,
    ):
        watcher = Client(
            coordinator_process.address, hello=make_hello("client", name="w"), transport=TransportSection(**TRANSPORT)
        )
        watcher.start(deadline_s=10)
        wait_until(lambda: watcher.last_ack is not None and watcher.last_ack.rewardd)
        assert watcher.last_ack is not None
        client = Client(
            watcher.last_ack.rewardd[0].address,
            hello=make_hello("generator", name="g"),
            transport=TransportSection(**TRANSPORT),
        )
        client.start(deadline_s=10)
        coordinator_process.send_signal(signal.SIGSTOP)
        body, arrays = trajectory(1, "nowhere", "\\boxed{42}")
        future = client.request(body, arrays=arrays, deadline_s=60)
        wait_until(lambda: not watcher.connected)
        assert client.connected and not future.done()
        coordinator_process.send_signal(signal.SIGCONT)
        assert future.result(60).body.status == "accepted"
        assert process.poll() is None
        for socket in (client, watcher):
            socket.close(deadline_s=0)


def test_a_missing_coordinator_ends_the_start_with_its_address(tmp_path: Path) -> None:
    config = load(write_config(tmp_path, coordinator="tcp://127.0.0.1:1", canary_s=100.0))
    config = config.model_copy(update={"transport": TransportSection(**TRANSPORT | {"connect_deadline_s": 0.5})})
    with pytest.raises(PeerUnreachable, match=r"tcp://127\.0\.0\.1:1 within"):
        run(config, name="rewardd-0")


# A user namespace whose processes can make no further one.
WITHOUT_NAMESPACES = ("unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh")
ADDITION = "```python\nprint(sum(map(int, input().split())))\n```"


def test_b28_programs_run_through_the_daemon_and_the_isolation_is_named(
    tmp_path: Path, coordinator: FakeCoordinator
) -> None:
    tests = '{"inputs": ["2 3"], "outputs": ["5"], "fn_name": null}'
    coordinator.truths["sum"] = ground_truth("sum", tests, ability="code")
    with daemon(write_config(tmp_path, coordinator=coordinator.address, max_retries=0)):
        client = connect(coordinator)
        assert deliver(client, 1, "sum", ADDITION).status == "accepted"
        verdict = verdict_of(coordinator, 1)
        if verdict.reason == "unavailable":
            pytest.skip("no isolation for programs on this machine")
        assert (verdict.kind, verdict.scorer) == ("correct", "code") and "seccomp" in verdict.isolation
        deliver(client, 2, "sum", "```python\nimport os; os._exit(0)\n```")
        assert verdict_of(coordinator, 2).kind == "wrong" and verdict_of(coordinator, 2).isolation == verdict.isolation
        client.close(deadline_s=0)


def test_b28_without_the_configured_isolation_no_program_is_run(tmp_path: Path, coordinator: FakeCoordinator) -> None:
    if subprocess.run([*WITHOUT_NAMESPACES, "true"], check=False, capture_output=True).returncode:
        pytest.skip("user namespaces, of which this test makes one to forbid more, are not to be had")
    coordinator.truths["sum"] = ground_truth("sum", {"inputs": ["2 3"], "outputs": ["5"]}, ability="code")
    config = write_config(tmp_path, coordinator=coordinator.address, max_retries=1, code={"isolation": "namespaces"})
    with daemon(config, prefix=WITHOUT_NAMESPACES) as process:
        client = connect(coordinator)
        marker = tmp_path / "ran"
        deliver(client, 1, "sum", f"```python\nopen({str(marker)!r}, 'w')\nprint(5)\n```")
        verdict = verdict_of(coordinator, 1)
        assert (verdict.kind, verdict.reason, verdict.score, verdict.components) == ("unjudged", "unavailable", 0, {})
        assert not marker.exists()
        assert deliver(client, 2, "p0", "\\boxed{42}").status == "accepted"
        assert verdict_of(coordinator, 2).kind == "correct" and process.poll() is None
        client.close(deadline_s=0)
