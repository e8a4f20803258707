"""Runs a generator as a role's process: `python -m tests.generators.main_process CONFIG_JSON NAME`."""

import sys

from generators.main import run
from protocol.config import Config
from protocol.logs import setup_logging

if __name__ == "__main__":
    setup_logging("generator", sys.argv[2])
    sys.exit(run(Config.model_validate_json(sys.argv[1]), name=sys.argv[2]))
