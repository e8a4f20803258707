"""Starts the coordinator as a process of its own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from protocol.config import Config

MAIN = (
    "import sys\n"
    "from protocol.config import Config\n"
    "from protocol.errors import UserError\n"
    "from learner.coordinator.main import run\n"
    "try:\n"
    "    sys.exit(run(Config.model_validate_json(open(sys.argv[1]).read()), name='coordinator'))\n"
    "except UserError as error:\n"
    "    print(f'error: {error}', file=sys.stderr)\n"
    "    sys.exit(error.status)\n"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(config: Config, folder: Path) -> subprocess.Popen[bytes]:
    path = folder / "config.json"
    path.write_text(config.model_dump_json())
    log = (folder / "coordinator.log").open("ab")
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, str(path)], stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
