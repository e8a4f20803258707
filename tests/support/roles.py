"""Real role processes of a run with scripted peers: run folder, configuration, start."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protocol.config import Config
from protocol.messages import StatusReply, StatusRequest
from protocol.sockets import Client, make_hello
from tests.support.tiny_model import build_tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "toy"
MAIN = """
import importlib, sys
from protocol.config import Config
from protocol.errors import UserError
from protocol.logs import setup_logging
role, path, name = sys.argv[1:]
setup_logging(role, name)
module = importlib.import_module({"coordinator": "learner.coordinator.main", "rewardd": "rewardd.main"}[role])
try:
    sys.exit(module.run(Config.model_validate_json(open(path).read()), name=name))
except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.status)
"""


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_run(folder: Path, *, num_prompts: int = 200, **overrides: Any) -> Config:
    """Data, tokenizer and configuration of a run in `folder`, scored by the pass-through scorer.

    `overrides` replace dotted keys, e.g. {"run.max_updates": 3}. The configuration is also written to config.json.
    """
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    build_tiny_tokenizer(model)
    (model / "config.json").write_text(json.dumps({"eos_token_id": 258}))
    rows = [
        {
            "data_source": SOURCE,
            "prompt": [{"role": "user", "content": f"What is {i} + 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i, "score": float(i % 2)},
        }
        for i in range(num_prompts)
    ]
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    tree: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "max_updates": 1_000_000},
        "model": {"path": str(model)},
        "data": {"train_files": [str(folder / "train.jsonl")]},
        "evaluation": {"at_start": False, "at_end": False},
        "coordinator": {"listen": f"tcp://127.0.0.1:{free_port()}"},
        "rewardd": {"scorers": {SOURCE: "passthrough"}},
    }
    for dotted, value in overrides.items():
        *sections, key = dotted.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    config = Config.model_validate(tree)
    write_config(config, folder / "config.json")
    return config


def write_config(config: Config, path: Path) -> Path:
    """The configuration as the role processes of tests read it."""
    path.write_text(config.model_dump_json())
    return path


def start_role(role: str, *, config: Path, name: str, log: Path) -> subprocess.Popen[bytes]:
    """The coordinator or a reward daemon as a process of its own; its log is appended to `log`."""
    return start_process([sys.executable, "-c", MAIN, role, str(config), name], log=log)


def start_process(command: Sequence[str], *, log: Path) -> subprocess.Popen[bytes]:
    """A child process that imports this tree, with one thread per numeric library."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path}
    with log.open("ab") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream, env=environment)


def ask_status(config: Config, *, deadline_s: float = 5.0, name: str = "status") -> StatusReply:
    """What `slipstream status` would show.

    Raises:
        PeerUnreachable, TimeoutError: no answer by the deadline.
    """
    client = Client(config.coordinator.listen, hello=make_hello("client", name=name), transport=config.transport)
    client.start(deadline_s=deadline_s)
    try:
        reply = client.request(StatusRequest(), deadline_s=deadline_s).result(timeout=deadline_s + 1.0).body
    finally:
        client.close(deadline_s=0.2)
    assert isinstance(reply, StatusReply)
    return reply
