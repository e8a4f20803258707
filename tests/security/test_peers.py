"""Hostile peers at a real coordinator and reward daemon: none gets in, breaks a role or moves the ledger."""

import random
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from deploy.cli import run
from learner.coordinator.schema import ledger_summary
from protocol import framing
from protocol import messages as m
from protocol.auth import ClientKeys, client_keys, secure_client
from protocol.config import Config
from protocol.errors import MessageTooLarge, PeerUnreachable
from protocol.sockets import Client, make_hello
from protocol.versions import tokenizer_hash
from tests.learner.coordinator.harness import answer
from tests.support.roles import ask_status, start_role, write_run
from tests.support.wait import wait_until

NUM_FUZZED = 10_000


@dataclass
class Site:
    """A coordinator and a reward daemon that run, and a generator that holds leases there."""

    config: Config
    processes: list[subprocess.Popen[bytes]]
    rewardd_address: str
    generator: Client
    lease: m.Lease

    @property
    def ledger(self) -> dict[str, int | bool]:
        return ledger_summary(Path(self.config.run.dir) / "coordinator" / "ledger.sqlite")

    def assert_well(self, before: dict[str, int | bool]) -> None:
        """Both roles live and answer, and the ledger is as it was."""
        assert [process.poll() for process in self.processes] == [None, None]
        assert ask_status(self.config, deadline_s=20.0).run_state == "running"
        assert self.ledger == before


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("security")
    assert run(["keys", str(folder / "keys")]) == 0
    config = write_run(
        folder,
        **{
            "transport": {"curve_dir": str(folder / "keys"), "max_message_mb": 1, "heartbeat_s": 0.5},
            "coordinator.lease_deadline_s": 600.0,
            "learner.groups_per_batch": 4,
            "learner.group_size": 2,
            "learner.max_tokens_per_micro_batch": 4096,
            "rewardd.code": {"enabled": False},
        },
    )
    path = folder / "config.json"
    processes = [
        start_role(role, config=path, name=role, log=folder / f"{role}.log") for role in ("coordinator", "rewardd")
    ]
    hello = make_hello("generator", name="honest", tokenizer_hash=tokenizer_hash(config.model.path))
    generator = Client(config.coordinator.listen, hello=hello, transport=config.transport)
    try:
        generator.start(deadline_s=60.0)
        wait_until(
            lambda: generator.last_ack is not None and generator.last_ack.rewardd, deadline_s=60.0, what="rewardd"
        )
        request = m.LeaseRequest(max_slots=4, policy_version=0)
        grant = generator.request(request, deadline_s=10.0).result(11.0).body
        assert isinstance(grant, m.LeaseGrant) and generator.last_ack is not None
        yield Site(config, processes, generator.last_ack.rewardd[0].address, generator, grant.leases[0])
    finally:
        generator.close(deadline_s=1.0)
        for process in processes:
            process.kill()
            process.wait()


def honest_keys(site: Site) -> ClientKeys:
    keys = client_keys(site.config.transport.curve_dir)
    assert keys is not None
    return keys


@contextmanager
def contexts() -> Iterator[zmq.Context]:
    """A context that is gone afterwards, unsent messages and all."""
    context = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


def dealer(context: zmq.Context, address: str, *, routing_id: bytes, keys: ClientKeys | None) -> zmq.Socket:
    connection = context.socket(zmq.DEALER)
    connection.setsockopt(zmq.ROUTING_ID, routing_id)
    if keys is not None:
        secure_client(connection, keys)
    connection.connect(address)
    return connection


@pytest.mark.parametrize("kind", ["without keys", "with foreign keys"])
def test_b35_strangers_hear_nothing_and_change_nothing(site: Site, tmp_path: Path, kind: str) -> None:
    before = site.ledger
    keys = None
    transport = site.config.transport.model_copy(update={"curve_dir": None})
    if kind == "with foreign keys":
        assert run(["keys", str(tmp_path / "own")]) == 0
        own = client_keys(tmp_path / "own")
        assert own is not None
        keys = ClientKeys(public=own.public, secret=own.secret, server_public=honest_keys(site).server_public)
    for address in (site.config.coordinator.listen, site.rewardd_address):
        hello = make_hello("generator", name="stranger")
        stranger = Client(address, hello=hello, transport=transport, client_keys=keys)
        with pytest.raises(PeerUnreachable, match=address):
            stranger.start(deadline_s=1.5)
    site.assert_well(before)


def test_b35_a_hello_recorded_on_the_wire_is_worth_nothing_when_replayed(site: Site) -> None:
    """The bytes of a whole authenticated session, sent again: CURVE's handshake is bound to fresh keys."""
    before = site.ledger
    host, port = site.config.coordinator.listen.removeprefix("tcp://").split(":")
    sent = record_session(site, host, int(port))
    assert len(sent) > 300
    heard = b""
    with socket.create_connection((host, int(port)), timeout=20.0) as replay:
        replay.sendall(sent)
        with suppress(ConnectionResetError):
            while chunk := replay.recv(65536):  # until the server ends the connection
                heard += chunk
    assert b"READY" not in heard, "the recorded second half of the handshake was taken for a new one"
    site.assert_well(before)


def record_session(site: Site, host: str, port: int) -> bytes:
    """What a client sends up to its welcome, recorded by a listener in between that passes everything on."""
    sent = bytearray()
    with contexts() as context, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(10.0)
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        client = dealer(context, address, routing_id=b"replayed/1", keys=honest_keys(site))
        hello = make_hello("client", name="replayed", incarnation="1")
        client.send(msgspec.msgpack.encode(m.Envelope(body=hello, msg_id=1)))
        near, _ = listener.accept()
        with near, socket.create_connection((host, port)) as far:
            poller = zmq.Poller()
            for end in (near.fileno(), far.fileno()):
                poller.register(end, zmq.POLLIN)
            deadline = monotonic() + 30.0
            while not client.poll(0):
                assert monotonic() < deadline, "no welcome through the listener"
                for fd, _ in poller.poll(50):
                    if fd == near.fileno():
                        chunk = near.recv(65536)
                        sent += chunk
                        far.sendall(chunk)
                    else:
                        near.sendall(far.recv(65536))
    return bytes(sent)


def test_b35_ten_thousand_fuzzed_messages_of_an_insider_harm_nobody(site: Site) -> None:
    """With keys and a hello: what a broken or hostile role of the run could send, to both servers."""
    before = site.ledger
    rng = random.Random(7)
    seeds = seed_messages(site)
    with contexts() as context:
        for address in (site.config.coordinator.listen, site.rewardd_address):
            fuzzer = dealer(context, address, routing_id=b"fuzzer/1", keys=honest_keys(site))
            hello = make_hello("generator", name="fuzzer", incarnation="1")
            fuzzer.send(msgspec.msgpack.encode(m.Envelope(body=hello, msg_id=1)))
            assert fuzzer.poll(20_000)
            for number in range(NUM_FUZZED // 2):
                assert fuzzer.poll(20_000, zmq.POLLOUT), "the server takes no more"
                fuzzer.send_multipart(mutated(rng.choice(seeds), rng))
                while number % 20 == 0 and fuzzer.poll(0):
                    fuzzer.recv_multipart()
            beat = m.Heartbeat(state="serving")
            fuzzer.send_multipart(framing.encode(m.Envelope(body=beat, msg_id=77_777)))
            deadline = monotonic() + 60.0
            while True:  # all before the last message was dealt with once it is answered
                assert monotonic() < deadline and fuzzer.poll(20_000)
                if msgspec.msgpack.decode(fuzzer.recv_multipart()[0]).get("reply_to") == 77_777:
                    break
        site.assert_well(before)
    memory_mb = max(psutil.Process(process.pid).memory_info().rss for process in site.processes) / 2**20
    assert memory_mb < 600


def seed_messages(site: Site) -> list[list[bytes]]:
    """Messages an honest role sends, of an unknown lease, so that even an unmutated one changes nothing."""
    lease = msgspec.structs.replace(site.lease, group_id=10**6)
    scored, arrays = answer(lease, 0)
    bodies: list[tuple[Any, dict[str, np.ndarray] | None]] = [
        (m.Heartbeat(state="serving", policy_version=0), None),
        (m.StatusRequest(), None),
        (m.GroundTruthRequest(prompt_ids=["x", "y"]), None),
        (scored, arrays),
        (scored.trajectory, arrays),
        (m.HandBack(group_id=10**6, attempt=1, slots=[0], partial=[], reason="x"), None),
    ]
    return [
        [bytes(frame) for frame in framing.encode(m.Envelope(body=body, msg_id=5), content)] for body, content in bodies
    ]


def mutated(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """One to four random changes: bits, cuts, insertions, frames swapped, doubled, lost or replaced."""
    frames = list(frames)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(frames))
        frame = bytearray(frames[at])
        change = rng.randrange(7)
        if change == 0 and frame:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        elif change == 1:
            del frame[rng.randrange(len(frame) + 1) :]
        elif change == 2:
            where = rng.randrange(len(frame) + 1)
            frame[where:where] = rng.randbytes(rng.randint(1, 64))
        elif change == 3:
            frame = bytearray(rng.randbytes(rng.randint(0, 200)))
        elif change == 4:
            frames.insert(rng.randrange(len(frames) + 1), rng.randbytes(rng.randint(0, 50)))
        elif change == 5 and len(frames) > 1:
            other = rng.randrange(len(frames))
            frames[at], frames[other] = frames[other], frames[at]
            continue
        elif change == 6 and len(frames) > 1:
            del frames[at]
            continue
        frames[frames.index(frames[at])] = bytes(frame)
    return frames


def test_b34_size_limits_refuse_early(site: Site) -> None:
    """The sender refuses before sending; a sender without manners is cut off by the receiver's socket."""
    before = site.ledger
    large = {"token_ids": np.zeros(1 << 19, np.int32)}
    with pytest.raises(MessageTooLarge, match=r"max_message_mb"):
        site.generator.request(m.StatusRequest(), arrays=large, deadline_s=5.0)
    with contexts() as context:
        rude = dealer(context, site.config.coordinator.listen, routing_id=b"rude/1", keys=honest_keys(site))
        memory = psutil.Process(site.processes[0].pid).memory_info().rss
        rude.send_multipart([bytes(2 << 20)])
        site.assert_well(before)
        assert psutil.Process(site.processes[0].pid).memory_info().rss < memory + (64 << 20)
