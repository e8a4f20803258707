"""Membership: who is sent to next, who is a suspect, what counts as held."""

from learner.weights.group import MAX_ATTEMPTS, TRANSPORT_REASON, Membership, choose_transport
from protocol.messages import WeightJoin, WeightStatus


def join(version: int = 0, **changes: object) -> WeightJoin:
    values: dict[str, object] = {"num_workers": 1, "transports": ["gloo"], "policy_version": version, "node": "n"}
    return WeightJoin(**{**values, **changes})  # type: ignore[arg-type]


def status(phase: str, *, epoch: int = 1, version: int = 5, reason: str = "") -> WeightStatus:
    return WeightStatus(epoch=epoch, policy_version=version, phase=phase, reason=reason)  # type: ignore[arg-type]


def three() -> Membership:
    membership = Membership()
    for name in ("a", "b", "c"):
        membership.add(name, "1", join(), transport="gloo")
    membership.set_target(5)
    return membership


def test_all_members_share_a_round_until_they_hold_the_target() -> None:
    membership = three()
    assert [m.name for m in membership.next_receivers()] == ["a", "b", "c"]
    membership.record("b", "1", status("committed"))
    assert [m.name for m in membership.next_receivers()] == ["a", "c"]
    assert membership.holders() == ["b"]


def test_b42_culprit_is_retried_alone_and_given_up_while_the_others_go_on() -> None:
    membership = three()
    receivers = membership.next_receivers()
    membership.record("a", "1", status("failed", reason=f"{TRANSPORT_REASON}reset"))
    membership.record("b", "1", status("failed", reason="unknown tensors"))
    membership.blame(receivers, 1)
    assert [m.name for m in membership.next_receivers()] == ["a"]
    membership.record("a", "1", status("committed", epoch=2))
    for epoch in range(3, 3 + MAX_ATTEMPTS - 1):
        alone = membership.next_receivers(alive=lambda name: name == "b")
        assert [m.name for m in alone] == ["b"]
        membership.record("b", "1", status("failed", epoch=epoch, reason="unknown tensors"))
        membership.blame(alone, epoch)
    assert membership.next_receivers(alive=lambda name: name == "b") == []
    assert membership.given_up() == {"b": "unknown tensors"}
    membership.set_target(6)
    assert [m.name for m in membership.next_receivers()] == ["a", "b", "c"]


def test_b44_silent_suspect_is_not_waited_for() -> None:
    membership = three()
    receivers = membership.next_receivers()
    for name in ("a", "b"):
        membership.record(name, "1", status("failed", reason=f"{TRANSPORT_REASON}reset"))
    membership.blame(receivers, 1)
    assert [m.name for m in membership.next_receivers(alive=lambda name: name != "c")] == ["a", "b"]
    for name in ("a", "b"):
        membership.record(name, "1", status("committed", epoch=2))
    assert membership.next_receivers(alive=lambda name: name != "c") == []


def test_b43_only_versions_this_publisher_brought_count() -> None:
    membership = Membership()
    membership.add("a", "1", join(version=5), transport="gloo")
    membership.set_target(5)
    assert [m.name for m in membership.next_receivers()] == ["a"]
    membership.record("a", "1", status("committed"))
    membership.add("a", "1", join(version=5), transport="gloo")
    assert membership.next_receivers() == []
    membership.add("a", "2", join(version=0), transport="gloo")
    assert [m.name for m in membership.next_receivers()] == ["a"]
    membership.remove("a", "1")
    assert "a" in membership.members
    membership.remove("a", "2")
    assert "a" not in membership.members


def test_transport_is_the_best_common_one() -> None:
    gpu = join(transports=["nccl", "ipc", "gloo"], device_uuids=["GPU-1"])
    assert choose_transport(gpu, wanted="auto", own_device_uuid="GPU-1") == "ipc"
    assert choose_transport(gpu, wanted="auto", own_device_uuid="GPU-0") == "nccl"
    assert choose_transport(gpu, wanted="auto", own_device_uuid="") == "gloo"
    assert choose_transport(join(), wanted="auto", own_device_uuid="GPU-0") == "gloo"
    assert choose_transport(join(), wanted="nccl", own_device_uuid="GPU-0") is None
