"""The toxic proxy: whole messages are lost, doubled, delayed or held, in order; nothing else changes."""

from collections.abc import Iterator

import pytest
import zmq

from deploy.soak.toxic import ToxicProxy, Toxics

PAYLOADS = [b"", b"a", b"b" * 300, b"c" * 100_000]


@pytest.fixture
def ends() -> Iterator[tuple[ToxicProxy, zmq.Socket, zmq.Socket]]:
    """A proxy, a DEALER on its near side, a ROUTER behind it."""
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    proxy = ToxicProxy(router.bind_to_random_port("tcp://127.0.0.1"), seed=3)
    dealer.setsockopt(zmq.ROUTING_ID, b"me")
    dealer.connect(proxy.address)
    dealer.send_multipart([b"first"])
    assert router.poll(10_000) and router.recv_multipart() == [b"me", b"first"]
    try:
        yield proxy, dealer, router
    finally:
        proxy.close()
        context.destroy(linger=0)


def received(router: zmq.Socket, *, until: bytes) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    while not messages or messages[-1] != [until]:
        assert router.poll(10_000), f"nothing after {len(messages)} messages"
        messages.append(router.recv_multipart()[1:])
    return messages


def test_messages_of_all_sizes_pass_both_ways_unchanged(ends) -> None:
    _, dealer, router = ends
    dealer.send_multipart(PAYLOADS)
    assert router.poll(10_000)
    assert router.recv_multipart() == [b"me", *PAYLOADS]
    router.send_multipart([b"me", *PAYLOADS])
    assert dealer.poll(10_000)
    assert dealer.recv_multipart() == PAYLOADS


def test_losses_and_doubles_are_whole_messages_in_order(ends) -> None:
    proxy, dealer, router = ends
    proxy.toxics = Toxics(drop=0.3, duplicate=0.3, delay_s=0.001)
    for number in range(100):
        dealer.send_multipart([b"%d" % number, b"x" * number])
    messages: list[list[bytes]] = []
    while router.poll(1000):
        messages.append(router.recv_multipart()[1:])
    numbers = [int(head) for head, _ in messages]
    assert all(len(body) == number for number, (_, body) in zip(numbers, messages, strict=True))
    assert numbers == sorted(numbers)
    assert len(numbers) == 100 - proxy.num_dropped + proxy.num_duplicated
    assert proxy.num_dropped > 10 and proxy.num_duplicated > 10


def test_a_stall_holds_messages_and_a_cut_is_survived_by_reconnecting(ends) -> None:
    proxy, dealer, router = ends
    proxy.toxics = Toxics(stalled=True)
    dealer.send(b"held")
    assert not router.poll(300)
    proxy.toxics = Toxics()
    assert received(router, until=b"held")
    proxy.cut()
    while not router.poll(200):  # what is sent before the new connection stands may be lost
        dealer.send(b"again")
    assert router.recv_multipart() == [b"me", b"again"]
