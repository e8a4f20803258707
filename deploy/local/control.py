"""How another shell talks to a running supervisor: one JSON line each way over a Unix socket, found by the state file.

State file RUN_DIR/state/supervisor.json: {"pid", "created", "socket", "roles": [...]}; see `Supervisor.snapshot`.
"""

import contextlib
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import psutil

from protocol.errors import ExitStatus, UserError

STATE_FILE = Path("state") / "supervisor.json"
_MAX_LINE = 65536


def listen() -> tuple[socket.socket, Path]:
    """A listening socket in a private folder of the temporary directory (run folders may have too long a path)."""
    path = Path(tempfile.mkdtemp(prefix="slipstream-")) / "control"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen(8)
    server.setblocking(False)
    return server, path


def close(server: socket.socket, path: Path) -> None:
    """Close the socket and remove its folder."""
    server.close()
    shutil.rmtree(path.parent, ignore_errors=True)


def read_line(connection: socket.socket, *, deadline_s: float) -> dict[str, Any]:
    """One JSON object from a connection.

    Raises:
        OSError: nothing whole arrived by the deadline.
        ValueError: not a JSON object.
    """
    connection.settimeout(deadline_s)
    data = b""
    while not data.endswith(b"\n") and len(data) < _MAX_LINE:
        chunk = connection.recv(_MAX_LINE)
        if not chunk:
            break
        data += chunk
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def write_line(connection: socket.socket, value: dict[str, Any]) -> None:
    """Send one JSON object."""
    connection.sendall(json.dumps(value).encode() + b"\n")


def write_state(run_dir: Path, state: dict[str, Any]) -> None:
    """Replace the state file."""
    path = run_dir / STATE_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(state, indent=1))
    scratch.replace(path)


def read_state(run_dir: Path) -> dict[str, Any] | None:
    """The supervisor's last state, or None when there was none."""
    try:
        value = json.loads((run_dir / STATE_FILE).read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def is_same_process(pid: int, created: float) -> bool:
    """Whether the process that had this pid and creation time is still alive."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return abs(process.create_time() - created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    return False


def running_state(run_dir: Path) -> dict[str, Any] | None:
    """The state of a supervisor that is alive, or None."""
    state = read_state(run_dir)
    if state is None or not is_same_process(state["pid"], state["created"]):
        return None
    return state


def request(run_dir: Path, command: dict[str, Any], *, deadline_s: float = 10.0) -> dict[str, Any]:
    """Send one command to the supervisor of a run and return its answer.

    Raises:
        UserError: no supervisor runs there, it does not answer, or it refuses.
    """
    state = running_state(run_dir)
    if state is None:
        raise UserError(
            f"no supervisor runs for {run_dir}: start it with `slipstream up`", status=ExitStatus.LOST_DEPENDENCY
        )
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(deadline_s)
            connection.connect(state["socket"])
            write_line(connection, command)
            answer = read_line(connection, deadline_s=deadline_s)
    except (OSError, ValueError) as problem:
        raise UserError(
            f"the supervisor of {run_dir} (pid {state['pid']}) did not answer in {deadline_s:g} s: {problem}",
            status=ExitStatus.LOST_DEPENDENCY,
        ) from None
    if "error" in answer:
        raise UserError(answer["error"])
    return answer
