"""Checks of this machine against a configuration: model and data files, ports, run folder, memory (without torch)."""

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from protocol.config.checks import Finding, error, max_response_tokens, warning
from protocol.config.tree import Config

NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "fuse.sshfs", "ceph", "glusterfs", "9p", "afs", "gpfs")
BYTES_PER_TRAINED_PARAMETER = 18
"""float32 master, two Adam moments and gradient, and the 2-byte working copy."""


def check_machine(config: Config) -> list[Finding]:
    """Findings about files, ports, disk and memory; takes well under a second."""
    found = [*_model(config), *_data(config), *_run_dir(config), *_port(config)]
    return sorted(found, key=lambda f: f.level)


def _model(config: Config) -> Iterator[Finding]:
    folder = Path(config.model.path)
    if not folder.is_dir():
        yield error("model.path", f"{folder} is no folder: name a Hugging Face model folder on this machine")
        return
    model = _read_json(folder / "config.json")
    if model is None:
        yield error("model.path", f"{folder} holds no readable config.json")
        return
    weights = sorted(folder.glob("*.safetensors"))
    if not weights and config.generators.load_format != "dummy":
        yield error("model.path", f"{folder} holds no *.safetensors weights")
    tokenizer = Path(config.model.tokenizer_path or config.model.path)
    if not (tokenizer / "tokenizer.json").is_file():
        key = "model.tokenizer_path" if config.model.tokenizer_path else "model.path"
        yield error(key, f"{tokenizer} holds no tokenizer.json (a fast tokenizer is needed)")
    longest, limit = config.data.max_prompt_tokens + max_response_tokens(config), model.get("max_position_embeddings")
    if isinstance(limit, int) and longest > limit:
        yield error(
            "data.max_prompt_tokens",
            f"{config.data.max_prompt_tokens} + sampling.max_response_tokens {max_response_tokens(config)} = {longest} "
            f"is above the model's {limit} positions: shorten one by {longest - limit}",
        )
    heads, parallel = model.get("num_attention_heads"), config.generators.tensor_parallel_size
    if isinstance(heads, int) and heads % parallel:
        yield error(
            "generators.tensor_parallel_size", f"{parallel} does not divide the model's {heads} attention heads"
        )
    if isinstance(heads, int) and heads % config.learner.sequence_parallel:
        yield error(
            "learner.sequence_parallel",
            f"{config.learner.sequence_parallel} does not divide the model's {heads} attention heads",
        )
    yield from _memory(config, sum(f.stat().st_size for f in weights), model)


def _memory(config: Config, weight_bytes: int, model: dict[str, Any]) -> Iterator[Finding]:
    if config.trainer.device != "cpu" or not weight_bytes:
        return
    width = 4 if "32" in str(model.get("dtype") or model.get("torch_dtype")) else 2
    needed = weight_bytes // width * BYTES_PER_TRAINED_PARAMETER
    total = psutil.virtual_memory().total
    if needed > total:
        yield error(
            "model.path",
            f"training {weight_bytes / width / 1e6:.0f} M parameters needs about {needed / 1e9:.0f} GB of memory "
            f"({BYTES_PER_TRAINED_PARAMETER} bytes each), this machine has {total / 1e9:.0f} GB",
        )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _data(config: Config) -> Iterator[Finding]:
    for key, files in (("data.train_files", config.data.train_files), ("data.eval_files", config.data.eval_files)):
        if key == "data.train_files" and not files:
            yield error(key, "names no file")
        for name in files:
            if "://" not in name:
                problem = _data_problem(Path(name))
                if problem:
                    yield error(key, f"{name} {problem}")


def _data_problem(path: Path) -> str | None:
    """What is wrong with a data file at first sight, or None."""
    if not path.is_file():
        return "does not exist"
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            columns, num_rows = set(pq.read_schema(path).names), pq.read_metadata(path).num_rows
        except (pa.ArrowException, OSError) as problem:
            return f"is not readable as parquet ({problem})"
    else:
        with path.open("rb") as lines:
            first = lines.readline()
        try:
            row = json.loads(first or b"null")
        except ValueError as problem:
            return f"is not JSON lines ({problem})"
        columns, num_rows = (set(row), 1) if isinstance(row, dict) else (set(), 0)
    missing = [c for c in ("data_source", "prompt", "reward_model") if c not in columns]
    if not num_rows:
        return "holds no rows"
    return f"lacks the columns {', '.join(missing)}" if missing else None


def _run_dir(config: Config) -> Iterator[Finding]:
    folder = Path(config.run.dir)
    parent = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
    if not parent.is_dir():
        yield error("run.dir", f"{folder} cannot be made: {parent} is a file")
        return
    if not os.access(parent, os.W_OK | os.X_OK):
        yield error("run.dir", f"{folder} cannot be written: no permission in {parent}")
        return
    kind = _file_system(parent)
    if kind in NETWORK_FILE_SYSTEMS:
        yield error("run.dir", f"{folder} is on a network file system ({kind}): the journal needs a local disk")
    free_gb = shutil.disk_usage(parent).free / 1e9
    needed_gb = config.deploy.min_free_gb + config.learner.checkpoint.min_free_gb
    if free_gb < needed_gb:
        yield error(
            "run.dir",
            f"{folder} has {free_gb:.1f} GB free, {needed_gb:.1f} GB are wanted "
            "(deploy.min_free_gb + learner.checkpoint.min_free_gb)",
        )
    elif free_gb < 5 * needed_gb:
        yield warning("run.dir", f"{folder} has only {free_gb:.1f} GB free")


def _file_system(path: Path) -> str:
    best, kind = "", ""
    for part in psutil.disk_partitions(all=True):
        inside = str(path) == part.mountpoint or str(path).startswith(part.mountpoint.rstrip("/") + "/")
        if inside and len(part.mountpoint) > len(best):
            best, kind = part.mountpoint, part.fstype
    return kind


def _port(config: Config) -> Iterator[Finding]:
    parts = urlsplit(config.coordinator.listen)
    ports = [("coordinator.listen", parts.port)] if parts.scheme == "tcp" else []
    ports += [
        ("coordinator.metrics_port", config.coordinator.metrics_port),
        ("trainer.metrics_port", config.trainer.metrics_port),
        ("generators.metrics_port", config.generators.metrics_port),
        ("rewardd.metrics_port", config.rewardd.metrics_port),
    ]
    for key, port in ports:
        if port and (holder := port_holder(port)):
            yield error(key, f"port {port} is taken by {holder}: stop it or choose another, such as {free_port()}")


def port_holder(port: int) -> str | None:
    """Who listens on a TCP port of this machine ("a process of another user" when that is hidden), or None."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            return None
        except OSError:
            pid = next(
                (
                    c.pid
                    for c in psutil.net_connections("tcp")
                    if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN and c.pid
                ),
                None,
            )
    if pid is None:
        return "a process of another user"
    try:
        return f"pid {pid} ({' '.join(psutil.Process(pid).cmdline())[:80]})"
    except psutil.Error:
        return f"pid {pid}"


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
