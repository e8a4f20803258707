"""A supervisor for tests of the demo: the real coordinator, and one stand-in that plays all other roles.

usage: python -m tests.deploy.standins supervise RUN_DIR MODE | peers RUN_DIR
MODE: finish (train to the end), hang (the peers do nothing), fail (the peers exit at once with status 70).
"""

import sys
import threading
from pathlib import Path

from deploy.local.specs import RoleSpec, role_command
from deploy.local.supervisor import Supervisor
from protocol.config.load import load_config
from protocol.logs import setup_logging
from tests.learner.coordinator.test_process import Script


def supervise(run_dir: Path, mode: str) -> int:
    setup_logging("supervisor", "test")
    peers = {
        "finish": (sys.executable, "-m", "tests.deploy.standins", "peers", str(run_dir)),
        "hang": (sys.executable, "-c", "import time; time.sleep(600)"),
        "fail": (sys.executable, "-c", "print('engine on fire'); raise SystemExit(70)"),
    }
    config_path = run_dir / "config.yaml"
    settings = load_config(config_path).config.deploy.model_copy(update={"backoff_s": 0.05, "max_backoff_s": 0.1})
    specs = [
        RoleSpec(
            role="coordinator",
            name="coordinator",
            command=role_command("coordinator", config_path=config_path, name="coordinator"),
        ),
        RoleSpec(role="trainer", name="trainer", command=peers[mode]),
    ]
    return int(Supervisor(run_dir, specs, settings=settings).run())


def play_peers(run_dir: Path) -> int:
    config = load_config(run_dir / "config.yaml").config
    script = Script(config, config.coordinator.listen)
    script.start()
    while not script.finished.wait(1.0):
        if not any(t.is_alive() for t in threading.enumerate() if t is script._thread):
            return 1
    script.close()
    return 0


if __name__ == "__main__":
    what, folder = sys.argv[1], Path(sys.argv[2])
    sys.exit(supervise(folder, sys.argv[3]) if what == "supervise" else play_peers(folder))
