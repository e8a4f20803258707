"""A client as a process: `python -m tests.protocol.client_process ADDRESS NAME` prints "up" and beats until killed."""

import sys
import threading

from protocol.errors import PeerRefused
from protocol.sockets import Client, make_hello
from tests.protocol.support import FAST

if __name__ == "__main__":
    client = Client(sys.argv[1], hello=make_hello("generator", name=sys.argv[2]), transport=FAST)
    try:
        client.start(deadline_s=10)
    except PeerRefused as error:
        print(error.code, error, flush=True)
        sys.exit(error.status)
    print("up", flush=True)
    threading.Event().wait()
