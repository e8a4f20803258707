"""Who may connect: loopback without keys, CURVE keys for everything else (design.md, invariant 10).

A key folder holds `server.key`, `server.key_secret`, `client.key`, `client.key_secret` and `authorized/*.key`, the
public keys that servers let in. The roles of a run share the folder; adding a public key to `authorized/` before
the start lets another key pair in.
"""

import ipaddress
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from protocol.errors import UserError


@dataclass(frozen=True)
class ServerKeys:
    """Key pair of a listening socket and the folder of the public keys it lets in."""

    public: bytes
    secret: bytes = field(repr=False)
    authorized: Path


@dataclass(frozen=True)
class ClientKeys:
    """Key pair of a connecting socket and the public key it expects of the server."""

    public: bytes
    secret: bytes = field(repr=False)
    server_public: bytes


def generate_keys(folder: str | Path) -> list[Path]:
    """Create a key folder (mode 0700, secrets 0600) and return the files written.

    Raises:
        UserError: the folder already holds keys.
    """
    folder = Path(folder)
    existing = sorted(folder.glob("*.key*"))
    if existing:
        raise UserError(f"{folder} already holds keys ({existing[0].name}); name another folder or delete them")
    authorized = folder / "authorized"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authorized.mkdir(exist_ok=True, mode=0o700)
    written: list[Path] = []
    old_umask = os.umask(0o077)
    try:
        for name in ("server", "client"):
            public, secret = zmq.auth.create_certificates(str(folder), name)
            written += [Path(public), Path(secret)]
        allowed = authorized / "client.key"
        allowed.write_bytes((folder / "client.key").read_bytes())
    finally:
        os.umask(old_umask)
    return [*written, allowed]


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"transport.curve_dir: cannot read key {path} ({error}); run `slipstream keys`") from error


def _load_pair(path: Path) -> tuple[bytes, bytes]:
    public, secret = _load(path)
    if secret is None:
        raise UserError(f"transport.curve_dir: {path} holds no secret key; run `slipstream keys`")
    return public, secret


def server_keys(curve_dir: str | Path | None) -> ServerKeys | None:
    """Keys of a listening socket, or None when no folder is configured."""
    if curve_dir is None:
        return None
    public, secret = _load_pair(Path(curve_dir) / "server.key_secret")
    return ServerKeys(public=public, secret=secret, authorized=Path(curve_dir) / "authorized")


def client_keys(curve_dir: str | Path | None) -> ClientKeys | None:
    """Keys of a connecting socket, or None when no folder is configured."""
    if curve_dir is None:
        return None
    public, secret = _load_pair(Path(curve_dir) / "client.key_secret")
    return ClientKeys(public=public, secret=secret, server_public=_load(Path(curve_dir) / "server.key")[0])


def secure_server(socket: zmq.Socket, context: zmq.Context, keys: ServerKeys) -> ThreadAuthenticator:
    """Make a socket that is not yet bound a CURVE server which lets in only authorized keys.

    Returns the running authenticator of the context; the caller stops it.
    """
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain="*", location=str(keys.authorized))
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.curve_server = True
    return authenticator


def secure_client(socket: zmq.Socket, keys: ClientKeys) -> None:
    """Make a socket that is not yet connected a CURVE client."""
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.curve_serverkey = keys.server_public


def host_of(address: str) -> str:
    """Host part of tcp://HOST:PORT ("" for ipc:// and inproc://)."""
    parts = urlsplit(address)
    return (parts.hostname or "*") if parts.scheme == "tcp" else ""


def is_wildcard(address: str) -> bool:
    """Whether the address means every interface."""
    return host_of(address) in ("*", "0.0.0.0", "::")


def is_local_only(address: str) -> bool:
    """Whether only this machine can reach the address (loopback or a local transport)."""
    host = host_of(address)
    if host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_listen(address: str, *, setting: str, has_keys: bool) -> None:
    """Refuse to listen off loopback without keys.

    Raises:
        UserError: naming the setting.
    """
    if not is_local_only(address) and not has_keys:
        raise UserError(
            f"{setting} = {address} listens beyond this machine without keys: set transport.curve_dir "
            "(make a key folder with `slipstream keys`) or listen on tcp://127.0.0.1"
        )


def check_advertised(address: str, *, setting: str, peer_host: str | None = None) -> None:
    """Refuse an address that another role could not use.

    Args:
        address: where others are told to connect.
        setting: dotted name of the setting it comes from.
        peer_host: host of the role that will connect; None = this machine.

    Raises:
        UserError: a wildcard, or a loopback address for a role on another machine.
    """
    if is_wildcard(address):
        raise UserError(f"{setting} = {address} is no address to connect to: name this machine's own address")
    if peer_host is not None and peer_host != socket.gethostname() and is_local_only(address):
        raise UserError(
            f"{setting} = {address} cannot be reached from {peer_host}: name an address of {socket.gethostname()} "
            "that other machines reach"
        )
