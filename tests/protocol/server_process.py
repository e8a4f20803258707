"""A server as a process: `python -m tests.protocol.server_process ADDRESS` prints its address and serves."""

import sys
import threading

from tests.protocol.support import ServerThread

if __name__ == "__main__":
    server = ServerThread(sys.argv[1])
    print(server.address, flush=True)
    threading.Event().wait()
