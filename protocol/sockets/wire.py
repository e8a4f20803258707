"""Raw multipart traffic and the socket options both ends share."""

from math import prod
from typing import NamedTuple

import numpy as np
import zmq

from protocol import framing
from protocol.config.services import TransportSection
from protocol.errors import FrameError
from protocol.framing import Frame
from protocol.messages import Envelope

COPY_BELOW = 65_536
"""Frames below this many bytes are cheaper to copy than to share (pyzmq's own threshold)."""
COPY_BELOW_ELEMENTS = 16_384
"""The same for arrays about to be received, of 4 bytes per element."""


def configure(socket: zmq.Socket, transport: TransportSection) -> None:
    """Options of every socket: bounded queues, bounded frames, no lingering, dead connections closed by the kernel.

    ZMTP's own heartbeats stay off: libzmq 4.3.5 aborts the process (`!_io_error`, stream_engine_base.cpp) when its
    timer fires on a connection that ended while its input was held back. Silence is noticed by our heartbeats.
    """
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = transport.outbox_messages
    socket.maxmsgsize = max_bytes(transport)
    seconds = max(1, int(transport.peer_timeout_s))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, seconds)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, seconds)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_MAXRT, 4000 * seconds)


def max_bytes(transport: TransportSection) -> int:
    """Largest message, all frames together."""
    return transport.max_message_mb * 2**20


def send(socket: zmq.Socket, frames: list[Frame]) -> None:
    """Send without blocking; raises zmq.Again or EHOSTUNREACH before anything was sent."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = zmq.DONTWAIT if index == last else zmq.DONTWAIT | zmq.SNDMORE
        socket.send(frame, flags, copy=len(frame) < COPY_BELOW if type(frame) is bytes else frame.nbytes < COPY_BELOW)


class Incoming(NamedTuple):
    """One message; `problem` says why it is malformed (then there is no envelope)."""

    routing_id: bytes
    envelope: Envelope | None
    arrays: dict[str, np.ndarray]
    problem: str = ""


def receive(socket: zmq.Socket, *, has_routing_id: bool, limit: int) -> Incoming:
    """One message without blocking; raises zmq.Again when there is none.

    The header says how large the arrays are: small ones are copied out of libzmq, large ones shared with it. The rest
    of a malformed message is read and dropped.
    """
    recv, more = socket.recv, zmq.RCVMORE
    routing_id = b""
    header = recv(zmq.DONTWAIT)
    if has_routing_id:
        routing_id = header
        header = recv() if socket.getsockopt(more) else b""
    frames: list[framing.Frame] = []
    try:
        envelope = framing.decode_header(header)
        size = len(header)
        for spec in envelope.arrays:
            if not socket.getsockopt(more):
                break
            frame = recv(0, prod(spec.shape) < COPY_BELOW_ELEMENTS)
            size += len(frame)
            if size > limit:
                raise FrameError(f"message above the limit of {limit} bytes")
            frames.append(frame)
        if socket.getsockopt(more):
            raise FrameError("more frames than described")
        return Incoming(routing_id, envelope, framing.decode_arrays(envelope, frames))
    except FrameError as error:
        while socket.getsockopt(more):
            recv(0, False)
        return Incoming(routing_id, None, {}, str(error))
