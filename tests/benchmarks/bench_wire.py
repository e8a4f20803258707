"""The wire: trajectories of 2,048 tokens into a `Server`, against bare pyzmq receiving the very same frames.

``run(quick)`` gives the figures of ``slipstream bench wire``; run as a script it prints them as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import threading
import time

import msgspec
import numpy as np
import zmq

from protocol import framing
from protocol.config.services import TransportSection
from protocol.messages import Envelope, Heartbeat, Hello, SamplingParams, Trajectory, Welcome
from protocol.sockets import Server, make_hello

NUM_PROMPT, NUM_RESPONSE = 256, 1792
TRANSPORT = TransportSection(peer_timeout_s=60)


def sample_frames() -> list[bytes]:
    """Header and three arrays of one trajectory of 2,048 tokens (the mask is not sent when all tokens are sampled)."""
    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, max_tokens=2048, min_tokens=0, stop_token_ids=(0,), stop=(),
        repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, seed=None,
    )  # fmt: skip
    body = Trajectory(
        group_id=1, slot=0, attempt=1, prompt_id="train:000001", generator="generator-0", purpose="train", stage=0,
        num_prompt_tokens=NUM_PROMPT, num_response_tokens=NUM_RESPONSE, finish_reason="stop", stop_reason="0",
        sampling=sampling, response_text="x" * 4 * NUM_RESPONSE, tokenizer_hash="0" * 16, seconds=12.5,
    )  # fmt: skip
    arrays = {
        "token_ids": np.arange(NUM_PROMPT + NUM_RESPONSE, dtype=np.int32),
        "logp_behaviour": np.full(NUM_RESPONSE, -0.5, np.float32),
        "versions": np.zeros(NUM_RESPONSE, np.int32),
    }
    return [bytes(frame) for frame in framing.encode(Envelope(body=body, msg_id=1), arrays)]


def _send(address: str, num: int, greet: bool) -> None:
    """Sender process: the same frames, as fast as the socket takes them."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, b"sender/1")
    socket.connect(address)
    if greet:
        hello = make_hello("generator", name="sender", incarnation="1")
        socket.send(msgspec.msgpack.encode({"body": msgspec.to_builtins(hello), "msg_id": 1}))
    frames = sample_frames()
    for _ in range(num):
        socket.send_multipart(frames)
    # Closing with unread data (heartbeats of the other side) would reset the connection and lose what is in flight.
    threading.Event().wait()


def _with_sender(address: str, num: int, *, greet: bool) -> multiprocessing.Process:
    sender = multiprocessing.get_context("spawn").Process(target=_send, args=(address, num, greet))
    sender.start()
    return sender


def raw_rate(num: int) -> float:
    """Messages per second that `recv_multipart` on a bare ROUTER takes."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.rcvhwm = TRANSPORT.outbox_messages
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    sender = _with_sender(f"tcp://127.0.0.1:{port}", num, greet=False)
    socket.recv_multipart()
    start = time.perf_counter()
    for _ in range(num - 1):
        socket.recv_multipart()
    rate = (num - 1) / (time.perf_counter() - start)
    sender.kill()
    sender.join()
    socket.close()
    context.term()
    return rate


def server_rate(num: int) -> float:
    """Messages per second that `Server.poll` hands out, decoded and with arrays."""

    def accept(hello: Hello) -> Welcome:
        return Welcome(server="s", incarnation="1", run_id="r", policy_version=0, published_version=0)

    server = Server("tcp://127.0.0.1:0", name="s", transport=TRANSPORT, accept=accept)
    sender = _with_sender(server.address, num, greet=True)
    received = 0
    while not received:
        received += len(server.poll(1.0))
    begin = received
    start = time.perf_counter()
    while received < num:
        received += sum(type(message.body) is not Heartbeat for message in server.poll(1.0))
    rate = (num - begin) / (time.perf_counter() - start)
    sender.kill()
    sender.join()
    server.close(deadline_s=0)
    return rate


def _figure(values: list[float], unit: str) -> dict[str, object]:
    return {
        "value": statistics.median(values),
        "unit": unit,
        "spread": [min(values), max(values)],
        "num_runs": len(values),
    }


def run(quick: bool = False) -> dict[str, dict[str, object]]:
    """Figures ``raw_messages_per_s``, ``server_messages_per_s``, ``server_over_raw`` and ``server_mb_per_s``."""
    num, num_runs = (20_000, 2) if quick else (60_000, 5)
    size_mb = sum(map(len, sample_frames())) / 1e6
    raw, server = [], []
    for _ in range(num_runs):
        raw.append(raw_rate(num))
        server.append(server_rate(num))
    return {
        "raw_messages_per_s": _figure(raw, "messages/s"),
        "server_messages_per_s": _figure(server, "messages/s"),
        "server_over_raw": _figure([ours / bare for ours, bare in zip(server, raw, strict=True)], "ratio"),
        "server_mb_per_s": _figure([rate * size_mb for rate in server], "MB/s"),
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
