"""Envelope and arrays to ZeroMQ frames and back.

    frame 0        MessagePack of `Envelope`; `arrays` lists (name, dtype, shape) in the order of the frames
    frame 1 .. N   raw little-endian C-order contents of the arrays

Arrays are neither copied by `encode` (unless they are not contiguous or not little endian) nor by `decode`, whose
arrays are read-only views of the frames.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np

from protocol.errors import FrameError, MessageTooLarge
from protocol.messages import ArraySpec, Envelope

Frame = Any
"""Anything with the buffer protocol: bytes, memoryview, numpy array, zmq.Frame."""

MAX_ARRAYS = 16_384
MAX_DIMENSIONS = 8
_DTYPES = {
    code: np.dtype(code)
    for code in ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
}
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def _frame_of(name: str, array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    if array.dtype.str not in _DTYPES:
        raise FrameError(f"array {name!r} has dtype {array.dtype}, which the wire does not carry")
    if array.ndim > MAX_DIMENSIONS:
        raise FrameError(f"array {name!r} has {array.ndim} dimensions; at most {MAX_DIMENSIONS} are carried")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def encode(
    envelope: Envelope, arrays: Mapping[str, np.ndarray] | None = None, *, max_bytes: int | None = None
) -> list[Frame]:
    """Frames of one message; `envelope.arrays` is filled in from `arrays`.

    Raises:
        FrameError: an array type or a value in the body that the wire does not carry.
        MessageTooLarge: the frames together hold more than `max_bytes`.
    """
    frames: list[Frame] = [b""]
    size = 0
    if arrays:
        if len(arrays) > MAX_ARRAYS:
            raise MessageTooLarge(f"{len(arrays)} arrays in one message; at most {MAX_ARRAYS} are carried")
        specs = []
        for name, value in arrays.items():
            array = _frame_of(name, value)
            specs.append(ArraySpec(name, array.dtype.str, array.shape))
            frames.append(array)
            size += array.nbytes
        envelope = Envelope(body=envelope.body, msg_id=envelope.msg_id, reply_to=envelope.reply_to, arrays=specs)
    try:
        header = _encoder.encode(envelope)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FrameError(f"{type(envelope.body).__name__} holds a value the wire does not carry: {error}") from error
    size += len(header)
    if max_bytes is not None and size > max_bytes:
        raise MessageTooLarge(
            f"{type(envelope.body).__name__} of {size} bytes is above the limit of {max_bytes} bytes; "
            "raise transport.max_message_mb or send less at once"
        )
    frames[0] = header
    return frames


def decode(frames: Sequence[Frame], *, max_bytes: int) -> tuple[Envelope, dict[str, np.ndarray]]:
    """Envelope and read-only array views of one received message (frame 0 is the header).

    Raises:
        FrameError: too large, not an envelope of the schema, or frames that disagree with their description.
    """
    if not frames:
        raise FrameError("no frames")
    size = sum(map(len, frames))
    if size > max_bytes:
        raise FrameError(f"message of {size} bytes is above the limit of {max_bytes}")
    envelope = decode_header(frames[0])
    return envelope, decode_arrays(envelope, frames[1:])


def decode_header(header: bytes) -> Envelope:
    """The envelope alone; raises FrameError when it is not of the schema."""
    try:
        return _decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise FrameError(f"header is not a known message: {error}") from error


def decode_arrays(envelope: Envelope, frames: Sequence[Frame]) -> dict[str, np.ndarray]:
    """Read-only views of the array frames; raises FrameError when they are not as the envelope describes them."""
    specs = envelope.arrays
    if len(specs) != len(frames):
        raise FrameError(f"{len(specs)} arrays are described, {len(frames)} array frames came")
    arrays: dict[str, np.ndarray] = {}
    for spec, frame in zip(specs, frames, strict=True):
        arrays[spec.name] = _array_of(spec, frame)
    if len(arrays) != len(specs):
        raise FrameError("two arrays have one name")
    return arrays


def _array_of(spec: ArraySpec, frame: Frame) -> np.ndarray:
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None:
        raise FrameError(f"array {spec.name!r} has dtype {spec.dtype!r}, which the wire does not carry")
    shape = spec.shape
    try:
        array = np.frombuffer(frame, dtype) if len(frame) else np.empty(0, dtype)
    except ValueError as error:
        raise FrameError(f"array {spec.name!r}: {error}") from error
    if array.shape != shape:
        if len(shape) > MAX_DIMENSIONS or any(n < 0 for n in shape) or prod(shape) != array.size:
            raise FrameError(f"array {spec.name!r} of shape {shape} came with {array.size} elements")
        array = array.reshape(shape)
    if array.flags.writeable:
        array.flags.writeable = False
    return array
