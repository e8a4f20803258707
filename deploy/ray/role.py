"""The actor of one role instance: keeps the role's process alive on its node. Knows Ray only by being its actor."""

import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any

from deploy.local.instance import Instance
from deploy.local.logfiles import rotate_if_large, tail
from deploy.local.notices import NoticeSocket
from deploy.local.specs import spec_of
from protocol.config import Config
from protocol.config.load import EFFECTIVE_NAME, dump_config

TICK_S = 0.2


class RoleActor:
    """Starts the role's process, restarts it with growing delay when it fails, and tells how it is.

    Args:
        values: the effective configuration (this node need not have the file).
        role: one of the four.
        index: which instance.
    """

    def __init__(self, *, values: dict[str, Any], role: str, index: int) -> None:
        config = Config.model_validate(values)
        run_dir = Path(config.run.dir)
        path = run_dir / EFFECTIVE_NAME
        if not path.is_file():
            run_dir.mkdir(parents=True, exist_ok=True)
            path.write_text(dump_config(config))
        self._max_log_bytes = config.deploy.log_mb * 2**20
        self._grace_s = config.deploy.stop_grace_s
        self._notices = NoticeSocket()
        self._lock = threading.Lock()
        self._instance = Instance(
            spec_of(config, role=role, index=index, config_path=path),
            config.deploy,
            run_dir / "logs",
            notify_address=self._notices.address,
        )
        threading.Thread(target=self._keep, daemon=True).start()

    def _keep(self) -> None:
        while True:
            select.select([self._notices], [], [], TICK_S)
            with self._lock:
                now = time.monotonic()
                for pid, fields in self._notices.read():
                    self._instance.note(pid, fields, now)
                self._instance.check(now)
                rotate_if_large(self._instance.log_path, max_bytes=self._max_log_bytes)

    def poll(self) -> dict[str, Any]:
        """State of the instance as the local supervisor's state file has it, and the node it is on."""
        with self._lock:
            instance = self._instance
            return {
                "role": instance.spec.role,
                "name": instance.spec.name,
                "state": instance.state,
                "ready": instance.is_ready,
                "since": instance.since + time.time() - time.monotonic(),
                "pids": instance.pids,
                "num_restarts": instance.num_restarts,
                "last_exit": instance.last_exit,
                "log": str(instance.log_path),
                "node": socket.gethostname(),
                "actor_pid": os.getpid(),
            }

    def stop(self, *, restart: bool = False) -> None:
        """Begin an orderly stop; `poll` tells when it is over."""
        with self._lock:
            self._instance.stop(time.monotonic(), grace_s=self._grace_s, restart=restart)

    def tail(self, num_lines: int) -> list[str]:
        """The last lines of the log."""
        return tail(self._instance.log_path, num_lines=num_lines)
