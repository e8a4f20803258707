"""Raw multipart traffic and the socket options both ends share."""

import zmq

from protocol.config.services import TransportSection
from protocol.framing import MAX_ARRAYS, Frame

COPY_BELOW = 65_536
"""Frames below this many bytes are cheaper to copy than to share (pyzmq's own threshold)."""


def configure(socket: zmq.Socket, transport: TransportSection) -> None:
    """Options of every socket: bounded queues, bounded frames, no lingering, dead connections noticed."""
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = transport.outbox_messages
    socket.maxmsgsize = max_bytes(transport)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(transport.heartbeat_s * 1000)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(transport.peer_timeout_s * 1000)))
    socket.setsockopt(zmq.HEARTBEAT_TTL, min(6_553_500, max(100, int(transport.peer_timeout_s * 1000))))


def max_bytes(transport: TransportSection) -> int:
    """Largest message, all frames together."""
    return transport.max_message_mb * 2**20


def send(socket: zmq.Socket, frames: list[Frame]) -> None:
    """Send without blocking; raises zmq.Again or EHOSTUNREACH before anything was sent."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = zmq.DONTWAIT if index == last else zmq.DONTWAIT | zmq.SNDMORE
        socket.send(frame, flags, copy=len(frame) < COPY_BELOW if type(frame) is bytes else frame.nbytes < COPY_BELOW)


def receive(socket: zmq.Socket, *, num_head: int, limit: int) -> list[Frame]:
    """One message without blocking: `num_head` frames as bytes, small array frames copied, large ones shared.

    A message above `limit` bytes or with too many frames comes back without its tail, which `framing.decode` refuses
    as a message whose frames are missing. Raises zmq.Again when there is none.
    """
    frames: list[Frame] = socket.recv_multipart(zmq.DONTWAIT, copy=False)
    if len(frames) > MAX_ARRAYS + num_head:
        del frames[num_head:]
    size = 0
    for index, frame in enumerate(frames):
        length = len(frame)
        size += length
        if index < num_head or length < COPY_BELOW:
            frames[index] = frame.bytes
    if size > limit:
        del frames[num_head:]
    return frames
