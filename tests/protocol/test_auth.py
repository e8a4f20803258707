"""Keys: loopback without, CURVE beyond."""

import stat
from pathlib import Path

import pytest

from protocol.auth import check_advertised, check_listen, client_keys, generate_keys, is_local_only
from protocol.errors import PeerUnreachable, UserError
from protocol.messages import Ack, StatusRequest
from protocol.sockets import Client, Server, make_hello
from tests.protocol.support import FAST, connected, serving, welcome


@pytest.fixture
def keyed(tmp_path: Path):
    generate_keys(tmp_path / "keys")
    return FAST.model_copy(update={"curve_dir": str(tmp_path / "keys")})


def test_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    written = generate_keys(tmp_path / "keys")
    assert {path.name for path in written} >= {"server.key", "server.key_secret", "client.key", "client.key_secret"}
    for path in written:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    with pytest.raises(UserError, match="already holds keys"):
        generate_keys(tmp_path / "keys")
    assert "secret" not in repr(client_keys(tmp_path / "keys")).replace("secret=", "")


def test_b35_peers_with_the_keys_get_in_and_others_do_not(keyed, tmp_path: Path) -> None:
    with serving(transport=keyed) as server:
        with connected(server.address, transport=keyed) as client:
            assert client.request(StatusRequest(), deadline_s=5).result(5).body == Ack(detail="seen")
        plain = Client(server.address, hello=make_hello("client", name="plain"), transport=FAST)
        with pytest.raises(PeerUnreachable, match=server.address):
            plain.start(deadline_s=1)
        generate_keys(tmp_path / "stolen")
        own = client_keys(tmp_path / "stolen")
        real = client_keys(keyed.curve_dir)
        assert own is not None and real is not None
        forged = type(own)(public=own.public, secret=own.secret, server_public=real.server_public)
        stranger = Client(server.address, hello=make_hello("client", name="x"), transport=FAST, client_keys=forged)
        with pytest.raises(PeerUnreachable, match="curve_dir"):
            stranger.start(deadline_s=1.5)
        assert server.server.stats.unknown == 0 and not server.server.stats.malformed


def test_b35_b36_listening_off_loopback_needs_keys(keyed) -> None:
    for address in ("tcp://0.0.0.0:0", "tcp://*:0"):
        with pytest.raises(UserError, match=r"coordinator\.listen.*slipstream keys"):
            Server(address, name="s", transport=FAST, accept=welcome, setting="coordinator.listen")
    Server("tcp://0.0.0.0:0", name="s", transport=keyed, accept=welcome).close(deadline_s=0)


def test_b36_addresses_nobody_can_use_are_refused_by_setting() -> None:
    with pytest.raises(UserError, match=r"weights\.listen"):
        check_advertised("tcp://0.0.0.0:1", setting="weights.listen")
    with pytest.raises(UserError, match=r"weights\.listen.*other-host"):
        check_advertised("tcp://localhost:1", setting="weights.listen", peer_host="other-host")
    check_advertised("tcp://127.0.0.1:1", setting="weights.listen")
    check_advertised("tcp://10.0.0.1:1", setting="weights.listen", peer_host="other-host")
    check_listen("ipc:///tmp/x", setting="s", has_keys=False)
    assert is_local_only("tcp://[::1]:5") and not is_local_only("tcp://example.org:5")


def test_missing_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"transport\.curve_dir.*slipstream keys"):
        client_keys(tmp_path)
