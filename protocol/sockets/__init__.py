"""Sockets of the roles: `Server` (ROUTER) and `Client` (DEALER with its own thread)."""

from protocol.sockets.client import Client
from protocol.sockets.peers import Peer, Received, Stats
from protocol.sockets.server import Server
from protocol.versions import make_hello, new_incarnation

__all__ = ["Client", "Peer", "Received", "Server", "Stats", "make_hello", "new_incarnation"]
