"""Server and client over real sockets, within one process and with peers in processes of their own."""

import asyncio
import signal
import socket
import threading
from concurrent.futures import Future

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from deploy.soak.toxic import ToxicProxy
from protocol.config.services import TransportSection
from protocol.errors import MessageTooLarge, PeerRefused, PeerUnreachable, UserError
from protocol.messages import PROTOCOL_VERSION, Ack, Envelope, Heartbeat, HeartbeatAck, StatusRequest
from protocol.sockets import Client, Server, make_hello
from protocol.sockets.peers import routing_id_of
from protocol.versions import tokenizer_hash
from tests.protocol.support import FAST, answer, connected, process, serving, welcome
from tests.support.wait import wait_until


def settled(future: Future, seconds: float = 10.0):
    return future.result(seconds).body


def test_requests_are_answered_with_their_arrays() -> None:
    arrays = {"a": np.arange(6).reshape(2, 3), "empty": np.zeros((0, 4), np.float32), "large": np.ones(200_000)}
    with serving() as server, connected(server.address) as client:
        assert client.welcome is not None and client.welcome.policy_version == 3
        received = client.request(StatusRequest(), arrays=arrays, deadline_s=5).result(10)
        assert received.body == Ack(detail="seen")
        for name, array in arrays.items():
            np.testing.assert_array_equal(received.arrays[name], array, strict=True)
            assert not received.arrays[name].flags.writeable
        assert server.received[0].peer.name == "client-0"


def test_futures_work_in_asyncio() -> None:
    async def ask(client: Client) -> object:
        futures = [asyncio.wrap_future(client.request(StatusRequest(), deadline_s=5)) for _ in range(20)]
        return [received.body for received in await asyncio.gather(*futures)]

    with serving() as server, connected(server.address) as client:
        assert asyncio.run(ask(client)) == [Ack(detail="seen")] * 20


def test_server_wakes_for_extra_descriptors() -> None:
    server = Server("tcp://127.0.0.1:0", name="s", transport=FAST, accept=welcome)
    ours, theirs = socket.socketpair()
    woken = threading.Event()

    def poll() -> None:
        server.poll(60, extra=[ours.fileno()])
        woken.set()

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    theirs.send(b"x")
    assert woken.wait(10)
    thread.join()
    server.close(deadline_s=0)
    ours.close()
    theirs.close()


def test_b32_heartbeat_acks_carry_the_current_version_within_a_heartbeat() -> None:
    seen: list = []
    with serving() as server, connected(server.address, on_message=seen.append) as client:
        wait_until(lambda: client.last_ack is not None)
        server.answer = lambda r: (
            HeartbeatAck(policy_version=9, published_version=9) if isinstance(r.body, Heartbeat) else None
        )
        wait_until(lambda: client.last_ack is not None and client.last_ack.policy_version == 9)
        assert isinstance(seen[0].body, HeartbeatAck)


def test_b29_a_peer_that_does_not_read_fills_its_outbox_and_nothing_is_lost_unseen() -> None:
    transport = FAST.model_copy(update={"outbox_messages": 16, "peer_timeout_s": 30.0})
    server = Server("tcp://127.0.0.1:0", name="s", transport=transport, accept=welcome)
    context = zmq.Context()
    slow = context.socket(zmq.DEALER)
    slow.rcvhwm = 4
    hello = make_hello("generator", name="slow", incarnation="1")
    slow.setsockopt(zmq.ROUTING_ID, b"slow/1")
    slow.connect(server.address)
    slow.send(msgspec.msgpack.encode({"body": msgspec.to_builtins(hello), "msg_id": 1}))
    wait_until(lambda: server.poll(0.05) is not None and server.peers())
    block = {"a": np.zeros(100_000)}
    results = [server.send("slow", Ack(), arrays=block) for _ in range(200)]
    assert not all(results) and results[0]
    waiting = len(server.peers()[0].outbox)
    stats = server.stats
    assert waiting == 16
    assert stats.offered == stats.sent + stats.refused + stats.dropped + waiting
    assert not server.send("nobody", Ack())
    arrived = 0
    while arrived < results.count(True) + 1:  # the welcome came first
        server.poll(0.01)
        while slow.poll(0):
            slow.recv_multipart()
            arrived += 1
    assert stats.offered == stats.sent + stats.refused
    slow.close(linger=0)
    context.term()
    server.close(deadline_s=0)


def test_b29_client_refuses_beyond_its_outbox() -> None:
    transport = FAST.model_copy(update={"outbox_messages": 8})
    with serving() as server, connected(server.address, transport=transport) as client:
        server.answer = lambda r: answer(r) if isinstance(r.body, Heartbeat) else None
        futures = [client.request(StatusRequest(), deadline_s=0.3) for _ in range(12)]
        assert [isinstance(f.exception(10), PeerUnreachable) for f in futures[8:]] == [True] * 4
        assert all(isinstance(f.exception(10), TimeoutError | PeerUnreachable) for f in futures[:8])
        server.answer = answer
        assert settled(client.request(StatusRequest(), deadline_s=5)) == Ack(detail="seen")


def test_b30_a_killed_peer_restarts_under_its_name_at_once() -> None:
    with serving() as server:
        for _ in range(3):
            with process("tests.protocol.client_process", server.address, "generator-0") as child:
                assert child.stdout is not None and child.stdout.readline() == "up\n"
                child.kill()
        wait_until(lambda: len(server.gone) == 3)


def test_b30_a_live_duplicate_is_refused_loudly_and_the_first_stays() -> None:
    with serving() as server, connected(server.address, name="generator-0") as first:
        with process("tests.protocol.client_process", server.address, "generator-0") as child:
            assert child.stdout is not None
            line = child.stdout.readline()
            assert line.startswith("duplicate_name") and "generator-0" in line and "--name" in line
            assert child.wait(10) != 0
        assert settled(first.request(StatusRequest(), deadline_s=5)) == Ack(detail="seen")


def test_b30_a_connection_that_was_taken_over_and_then_ends_harms_nobody() -> None:
    """libzmq aborted the process when such a connection ended with something unread and a heartbeat came due."""
    with process("tests.protocol.server_process", "tcp://127.0.0.1:0") as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        context = zmq.Context()
        try:
            for _ in range(5):
                twins = [context.socket(zmq.DEALER) for _ in range(2)]
                for twin in twins:
                    twin.setsockopt(zmq.ROUTING_ID, b"twin/1")
                    twin.connect(address)
                    hello = make_hello("client", name="twin", incarnation="1")
                    twin.send(msgspec.msgpack.encode(Envelope(body=hello, msg_id=1)))
                    assert twin.poll(5000)
                twins[0].send(b"unread")
                for twin in twins:
                    twin.close(linger=1000)
                with connected(address) as client:
                    for _ in range(4):
                        assert settled(client.request(StatusRequest(), deadline_s=5)) == Ack(detail="seen")
                        threading.Event().wait(FAST.heartbeat_s)
        finally:
            context.term()
        assert server.poll() is None


def test_b30_a_frozen_peer_is_replaced_and_learns_of_it_when_it_wakes() -> None:
    with serving() as server, process("tests.protocol.client_process", server.address, "generator-0") as frozen:
        assert frozen.stdout is not None and frozen.stdout.readline() == "up\n"
        frozen.send_signal(signal.SIGSTOP)
        with connected(server.address, name="generator-0") as second:
            frozen.send_signal(signal.SIGCONT)
            assert settled(second.request(StatusRequest(), deadline_s=5)) == Ack(detail="seen")
            wait_until(lambda: len(server.gone) == 1)
            assert len(server.server.peers()) == 1
            assert server.server.peers()[0].incarnation == second.hello.incarnation


def test_b33_both_sides_notice_a_freeze_and_recover() -> None:
    with serving() as server, process("tests.protocol.client_process", server.address, "generator-0") as child:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: server.gone, what="notice of the frozen client")
        child.send_signal(signal.SIGCONT)
        wait_until(lambda: server.server.peers(), what="return of the client")
    with process("tests.protocol.server_process", "tcp://127.0.0.1:0") as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        with connected(address) as client:
            child.send_signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED, what="stop of the server")
            future = client.request(StatusRequest(), deadline_s=30)
            with pytest.raises(PeerUnreachable, match="silent"):
                future.result(10)
            assert not client.connected
            child.send_signal(signal.SIGCONT)
            wait_until(lambda: client.connected, what="return of the server")
            assert settled(client.request(StatusRequest(), deadline_s=5)) == Ack(detail="seen")


def test_b33_a_new_connection_of_a_peer_is_never_mixed_up_with_its_old_one() -> None:
    """libzmq hands a routing id that comes again over and keeps the old connection's descriptor for ever."""
    with serving() as server:
        proxy = ToxicProxy(int(server.address.rsplit(":", 1)[1]))
        try:
            with connected(proxy.address, name="generator-0") as client:
                for opening in (1, 2):
                    proxy.cut()
                    wait_until(lambda: [peer.opening for peer in server.server.peers()] == [opening])  # noqa: B023
                    wait_until(lambda: client.connected)
                    assert settled(client.request(StatusRequest(), deadline_s=5)) == Ack(detail="seen")
                old = routing_id_of(client.hello)
                assert server.server.peers()[0].routing_id == old + b"#2" and not server.gone
                context = zmq.Context()
                with context.socket(zmq.DEALER) as late:  # what was still on its way over the first connection
                    late.setsockopt(zmq.ROUTING_ID, old)
                    late.connect(server.address)
                    late.send(msgspec.msgpack.encode(Envelope(body=client.hello, msg_id=1)))
                    assert late.poll(5000)
                    assert msgspec.msgpack.decode(late.recv())["body"]["code"] == "old_connection"
                context.destroy(linger=0)
                assert settled(client.request(StatusRequest(), deadline_s=5)) == Ack(detail="seen")
        finally:
            proxy.close()


def test_a_killed_and_restarted_server_is_found_again_and_requests_made_meanwhile_are_served() -> None:
    welcomes: list = []
    with process("tests.protocol.server_process", "tcp://127.0.0.1:0") as first:
        assert first.stdout is not None
        address = first.stdout.readline().strip()
        client = Client(address, hello=make_hello("client", name="c"), transport=FAST, on_welcome=welcomes.append)
        client.start(deadline_s=5)
    wait_until(lambda: not client.connected)
    future = client.request(StatusRequest(), deadline_s=30)
    late = client.request(StatusRequest(), deadline_s=0.1)
    assert isinstance(late.exception(10), PeerUnreachable) and address in str(late.exception())
    with process("tests.protocol.server_process", address):
        assert settled(future, 30) == Ack(detail="seen")
        assert len(welcomes) == 2
    client.close(deadline_s=0)


def test_b31_close_waits_for_acknowledgements_up_to_its_deadline() -> None:
    with serving() as server:
        with connected(server.address) as client:
            future = client.request(StatusRequest(), deadline_s=5)
            assert client.close(deadline_s=5, reason="done") == 0
            assert settled(future) == Ack(detail="seen")
        wait_until(lambda: server.gone)
        server.answer = lambda r: answer(r) if isinstance(r.body, Heartbeat) else None
        with connected(server.address) as client:
            future = client.request(StatusRequest(), deadline_s=5)
            assert client.close(deadline_s=0.2) == 1
            with pytest.raises(PeerUnreachable):
                future.result(5)


def test_b34_malformed_frames_are_counted_by_sender_and_dropped() -> None:
    with serving() as server, connected(server.address) as client:
        context = zmq.Context()
        raw = context.socket(zmq.DEALER)
        raw.setsockopt(zmq.ROUTING_ID, b"evil/1")
        raw.connect(server.address)
        junk: list[list[bytes]] = [
            [b""],
            [b"\xc1"],
            [b"junk", b"x"],
            [msgspec.msgpack.encode({"body": 1})],
            [b"\x91" * 9999],
        ]
        for frames in junk:
            raw.send_multipart(frames)
        wait_until(lambda: server.server.stats.malformed["evil/1"] == len(junk))
        assert settled(client.request(StatusRequest(), deadline_s=5)) == Ack(detail="seen")
        raw.send(msgspec.msgpack.encode({"body": {"type": "ack"}, "msg_id": 7}))
        assert raw.poll(5000)
        assert msgspec.msgpack.decode(raw.recv())["body"]["code"] == "hello_first"
        raw.close(linger=0)
        context.term()


def test_b34_size_limits_hold_on_both_sides() -> None:
    small = FAST.model_copy(update={"max_message_mb": 1})
    with serving(transport=small) as server, connected(server.address, transport=small) as client:
        with pytest.raises(MessageTooLarge, match="max_message_mb"):
            client.request(StatusRequest(), arrays={"a": np.zeros(200_000)}, deadline_s=1)
        exact = {"a": np.zeros(130_000)}
        assert settled(client.request(StatusRequest(), arrays=exact, deadline_s=5)) == Ack(detail="seen")
        with connected(server.address, name="large", transport=FAST) as large:
            parts = {str(n): np.zeros(60_000) for n in range(4)}
            future = large.request(StatusRequest(), arrays=parts, deadline_s=0.3)
            assert future.exception(5) is not None
            wait_until(lambda: server.server.stats.malformed.total() == 1)
            assert settled(large.request(StatusRequest(), deadline_s=5)) == Ack(detail="seen")


def test_other_protocol_version_or_tokenizer_is_refused_with_both_values() -> None:
    with serving(tokenizer_hash="aaaa") as server:
        old = msgspec.structs.replace(make_hello("client", name="old"), protocol_version=99)
        with pytest.raises(PeerRefused, match=f"99.*{PROTOCOL_VERSION}"), connected(server.address, hello=old):
            pass
        other = make_hello("generator", name="other", tokenizer_hash="bbbb")
        with pytest.raises(PeerRefused, match=r"bbbb.*aaaa") as caught, connected(server.address, hello=other):
            pass
        assert caught.value.code == "tokenizer_hash"
        with connected(server.address, hello=make_hello("generator", name="same", tokenizer_hash="aaaa")):
            pass


def test_b36_unreachable_and_unusable_addresses_are_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    client = Client(address, hello=make_hello("client", name="c"), transport=FAST)
    with pytest.raises(PeerUnreachable, match=address):
        client.start(deadline_s=0.3)
    with serving() as server:
        away = msgspec.structs.replace(
            make_hello("rewardd", name="r", attributes={"address": "tcp://127.0.0.1:5"}), host="elsewhere"
        )
        with pytest.raises(PeerRefused, match=r"rewardd\.listen.*127\.0\.0\.1"), connected(server.address, hello=away):
            pass
        everywhere = make_hello("rewardd", name="r", attributes={"address": "tcp://0.0.0.0:5"})
        with pytest.raises(PeerRefused, match=r"rewardd\.listen"), connected(server.address, hello=everywhere):
            pass
        with pytest.raises(UserError, match=r"coordinator\.listen.*in use.*pid"):
            Server(server.address, name="s", transport=FAST, accept=welcome, setting="coordinator.listen")


def test_threads_share_one_client() -> None:
    with serving() as server, connected(server.address) as client:
        results: list = []

        def ask() -> None:
            results.extend(settled(client.request(StatusRequest(), deadline_s=20)) for _ in range(50))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [Ack(detail="seen")] * 400
        assert client.stats.acked >= 400


def test_transport_defaults_connect() -> None:
    default = TransportSection()
    with serving(transport=default) as server, connected(server.address, transport=default) as client:
        assert settled(client.request(StatusRequest(), deadline_s=5)) == Ack(detail="seen")


def test_tokenizer_hash_is_of_the_file(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_hash(tmp_path) == "44136fa355b3678a"
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        tokenizer_hash(tmp_path / "none")
