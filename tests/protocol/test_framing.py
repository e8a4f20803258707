"""Frames: exact round trips, and nothing but FrameError for anything else."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protocol import framing
from protocol.errors import FrameError, MessageTooLarge
from protocol.messages import Ack, Envelope, Heartbeat, Lease, LeaseGrant, SamplingParams
from tests.rewardd.support import trajectory

MAX = 2**20
DTYPES = st.sampled_from(
    [np.bool_, np.int8, np.uint8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64]
)
ARRAYS = st.dictionaries(
    st.text(max_size=12),
    hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)),
    max_size=4,
)


def wire_form(frames: list) -> list[bytes]:
    return [bytes(memoryview(np.ascontiguousarray(f)).cast("B")) if isinstance(f, np.ndarray) and f.size else bytes(f)
            if not isinstance(f, np.ndarray) else b"" for f in frames]  # fmt: skip


@given(ARRAYS, st.integers(0, 2**63 - 1), st.none() | st.integers(0, 2**31), st.text(max_size=50))
def test_round_trip_is_exact_and_read_only(arrays, msg_id, reply_to, text) -> None:
    frames = framing.encode(Envelope(body=Ack(detail=text), msg_id=msg_id, reply_to=reply_to), arrays)
    envelope, back = framing.decode(wire_form(frames), max_bytes=MAX)
    assert (envelope.body, envelope.msg_id, envelope.reply_to) == (Ack(detail=text), msg_id, reply_to)
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array, strict=True)
        assert not back[name].flags.writeable


def test_header_is_plain_messagepack() -> None:
    body, arrays = trajectory(7, "p", "text")
    header = framing.encode(Envelope(body=body, msg_id=1), arrays)[0]
    plain = msgspec.msgpack.decode(header)
    assert plain["body"]["type"] == "trajectory" and plain["body"]["group_id"] == 7
    assert plain["arrays"][0] == ["token_ids", "<i4", [8]]


def test_arrays_are_not_copied() -> None:
    array = np.arange(1000, dtype=np.float32)
    frames = framing.encode(Envelope(body=Ack(), msg_id=1), {"a": array})
    assert np.shares_memory(frames[1], array)
    raw = array.tobytes()
    _, back = framing.decode([frames[0], raw], max_bytes=MAX)
    assert np.shares_memory(back["a"], np.frombuffer(raw, np.float32))


def test_strided_and_big_endian_arrays_arrive_whole() -> None:
    arrays = {"strided": np.arange(12).reshape(3, 4)[:, ::2], "big": np.arange(3, dtype=">i4")}
    frames = framing.encode(Envelope(body=Ack(), msg_id=1), arrays)
    _, back = framing.decode(wire_form(frames), max_bytes=MAX)
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


def test_b34_sender_refuses_what_is_too_large_or_unknown() -> None:
    envelope = Envelope(body=Ack(), msg_id=1)
    with pytest.raises(MessageTooLarge, match="max_message_mb"):
        framing.encode(envelope, {"a": np.zeros(100)}, max_bytes=500)
    with pytest.raises(FrameError, match="dtype"):
        framing.encode(envelope, {"a": np.array(["x"])})
    with pytest.raises(FrameError, match="dtype"):
        framing.encode(envelope, {"a": np.array([object()])})
    with pytest.raises(FrameError, match="Heartbeat"):
        framing.encode(Envelope(body=Heartbeat(state="up", metrics={"a": object()}), msg_id=1))  # type: ignore[dict-item]


SOUND = wire_form(framing.encode(Envelope(body=trajectory(1, "p", "t")[0], msg_id=1), trajectory(1, "p", "t")[1]))


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: [],
        lambda f: f[:-1],
        lambda f: [*f, b"extra"],
        lambda f: [f[0][:-3], *f[1:]],
        lambda f: [f[0], f[1][:-1], *f[2:]],
        lambda f: [f[0], f[1] + b"\0" * 4, *f[2:]],
        lambda f: [msgspec.msgpack.encode({"body": {"type": "unheard_of"}, "msg_id": 1})],
        lambda f: [msgspec.msgpack.encode({"body": {"type": "ack", "detail": 5}, "msg_id": 1})],
        lambda f: [msgspec.msgpack.encode({"body": {"type": "ack"}, "msg_id": 1, "arrays": [["a", "<f4", [-1]]]}), b""],
        lambda f: [msgspec.msgpack.encode({"body": {"type": "ack"}, "msg_id": 1, "arrays": [["a", "|O", [1]]]}), b"x"],
        lambda f: [b"\x91" * 100_000],
        lambda f: [f[0], b"\0" * MAX, *f[2:]],
    ],
)
def test_b34_damaged_messages_are_frame_errors(damage) -> None:
    with pytest.raises(FrameError):
        framing.decode(damage(list(SOUND)), max_bytes=MAX)


def _mutated(data: st.DataObject) -> list[bytes]:
    frames = list(SOUND)
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(frames) - 1))
        frame = bytearray(frames[index])
        at = data.draw(st.integers(0, max(0, len(frame) - 1)))
        frame[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        frames[index] = bytes(frame)
    return frames


@settings(max_examples=5_000, deadline=None)
@given(st.data())
def test_b35_fuzzed_real_messages_decode_or_are_frame_errors(data) -> None:
    try:
        envelope, arrays = framing.decode(_mutated(data), max_bytes=MAX)
    except FrameError:
        return
    assert len(arrays) == len(envelope.arrays)


@settings(max_examples=5_000, deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=5))
def test_b35_random_bytes_decode_or_are_frame_errors(frames) -> None:
    try:
        envelope, arrays = framing.decode(frames, max_bytes=MAX)
    except FrameError:
        return
    assert isinstance(envelope, Envelope) and len(arrays) == len(frames) - 1


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.floats(0.01, 10), st.none() | st.integers(0, 2**31))
def test_nested_bodies_round_trip(ids, temperature, seed) -> None:
    sampling = msgspec.structs.replace(trajectory(1, "p", "t")[0].sampling, temperature=temperature, seed=seed)
    assert isinstance(sampling, SamplingParams)
    lease = Lease(group_id=1, prompt_id="p", attempt=1, slots=[0, 1], prompt_token_ids=ids, sampling=sampling,
                  deadline_s=1.0, min_version=0)  # fmt: skip
    body = LeaseGrant(leases=[lease])
    envelope, _ = framing.decode(framing.encode(Envelope(body=body, msg_id=1)), max_bytes=MAX)
    assert envelope.body == body
