"""Weight updates of a running engine: this process is the trainer's rank 0, a child process is the generator.

On a GPU, for each size: pause to resume and the whole way from submit to commit, without and with requests in flight;
vLLM's own "ipc" engine on the same tensors in the same engine; and one call per parameter (the loop of older systems).
One card: CUDA IPC; two cards, the generator on the second: NCCL. Then a receiver is killed in the middle of a transfer
again and again beside one that lives. On CPUs the same over Gloo, with a tiny model, under keys that end in `_gloo`.
SLIPSTREAM_BENCH_SIZES ("0_5b,7b", or "none" for the kills alone) picks sizes; a figure says in its unit what it is of.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from learner.weights.publisher import Publisher
from learner.weights.snapshot import dtype_name
from protocol.config import Config
from protocol.messages import VersionPublished
from tests.benchmarks.generator_peer import MARK
from tests.benchmarks.weights_cases import (
    SIZES,
    TINY,
    Size,
    bench_config,
    random_weights,
    snapshot_of,
    write_folder,
)

Figures = dict[str, dict[str, object]]
START_S = 240.0
KILL_BUCKET_MB = 64


class PeerProcess:
    """The child: its replies, and the versions it took into use."""

    def __init__(self, config: Config, name: str, address: str, *, die_in: int = 0) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.generator_peer"]
        command += [config.model_dump_json(), name, address, "hash"]
        environment = {**os.environ, "SLIPSTREAM_BENCH_DIE_IN": str(die_in), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        if torch.cuda.device_count() > 1:
            environment["CUDA_VISIBLE_DEVICES"] = "1"
        self.popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.said: list[dict[str, Any]] = []
        self.spoke = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as output:
            for line in output:
                if not line.startswith(MARK):
                    print(line, end="", file=sys.stderr)
                    continue
                with self.spoke:
                    self.said.append(json.loads(line.removeprefix(MARK)))
                    self.spoke.notify_all()
        with self.spoke:
            self.said.append({"ended": True})
            self.spoke.notify_all()

    def wait_for(self, key: str, *, count: int = 1, deadline_s: float = START_S) -> Any:
        """The `count`-th reply that has `key`."""

        def found() -> list[Any]:
            return [said[key] for said in self.said if key in said][count - 1 :]

        with self.spoke:
            self.spoke.wait_for(lambda: found() or {"ended": True} in self.said, timeout=deadline_s)
            values = found()
            if not values:
                raise RuntimeError(f"the generator said no {key!r}: {str(self.said[-3:])[:500]}")
            return values[0]

    def ask(self, **command: Any) -> dict[str, Any]:
        """Sends a command and waits for its reply."""
        assert self.popen.stdin is not None
        num_before = sum("reply" in said for said in self.said)
        print(json.dumps(command), file=self.popen.stdin, flush=True)
        reply: dict[str, Any] = self.wait_for("reply", count=num_before + 1)
        return reply

    def close(self) -> None:
        """Ends it, politely at first."""
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()
        try:
            self.popen.wait(20.0)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self._reader.join()


class Trainer:
    """Weights and their publisher."""

    def __init__(self, config: Config, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.version = 0
        self.reports: list[tuple[float, VersionPublished]] = []
        self.publisher = Publisher(config, tokenizer_hash="hash", on_published=self._published)

    def _published(self, report: VersionPublished) -> None:
        self.reports.append((time.monotonic(), report))

    def publish(self, *, deadline_s: float = 120.0) -> dict[str, float]:
        """A new version to all members: seconds the step loop was held, and from submit to commit."""
        self.version += 1
        started = time.monotonic()
        self.publisher.submit(snapshot_of(self.weights, self.version))
        held_s = time.monotonic() - started
        wait_until(lambda: self.publisher.wait_idle(1.0), deadline_s, "the publisher to be idle")
        if not self.reports or self.reports[-1][1].policy_version != self.version:
            raise RuntimeError(f"version {self.version} was not published: {self.publisher.status()}")
        return {"held_s": held_s, "transfer_s": self.reports[-1][0] - started, "submitted": started}


def wait_until(condition: Callable[[], object], deadline_s: float, what: str) -> None:
    """Waits for a condition of another thread or process."""
    end = time.monotonic() + deadline_s
    turn = threading.Event()
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"no sign of {what} within {deadline_s:g} s")
        turn.wait(0.005)


def native_info(weights: dict[str, torch.Tensor]) -> str:
    """What vLLM's "ipc" engine is told: handles of the same tensors, pickled as it wants them."""
    from torch.multiprocessing.reductions import reduce_tensor

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    update = {
        "names": list(weights),
        "dtype_names": [dtype_name(tensor.dtype) for tensor in weights.values()],
        "shapes": [list(tensor.shape) for tensor in weights.values()],
        "ipc_handles": [{uuid: reduce_tensor(tensor)[1]} for tensor in weights.values()],
    }
    return base64.b64encode(pickle.dumps(update)).decode()


def rate(series: list[list[float]], start: float, end: float) -> float:
    """Tokens per second between two moments."""
    inside = [(t, n) for t, n in series if start <= t <= end]
    if len(inside) < 2 or inside[-1][0] <= inside[0][0]:
        return 0.0
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def measure_size(size: Size, folder: Path, *, on_gpu: bool, rounds: int) -> Figures:
    """All figures of one size, from one engine start."""
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    shapes = write_folder(size, folder / "model")
    config = bench_config(folder / "model", run_dir=folder, on_gpu=on_gpu)
    trainer = Trainer(config, random_weights(shapes, device=device))
    peer = PeerProcess(config, "g0", trainer.publisher.address)
    try:
        peer.wait_for("ready")
        wait_until(lambda: trainer.publisher.status()["members"], 30.0, "a member of the weight group")
        trainer.publish()  # forms the group; on a GPU also makes the plan of copies
        idle = [(trainer.publish(), peer.ask(do="last")) for _ in range(rounds)]
        busy, rates = under_load(trainer, peer, rounds=rounds, num_requests=64 if on_gpu else 4)
        native = native_seconds(trainer, peer, rounds=rounds) if on_gpu and torch.cuda.device_count() == 1 else None
    finally:
        peer.close()
        trainer.publisher.close()
    pauses = [last["pause_s"] for _, last in idle]
    figures = {
        f"pause_to_resume_s_{size.key}": figure(pauses, "s, no requests"),
        f"pause_to_resume_under_load_s_{size.key}": figure(busy, "s, requests in flight"),
        f"submit_to_commit_s_{size.key}": figure([t["transfer_s"] for t, _ in idle], "s"),
        f"hold_fraction_{size.key}": figure([t["held_s"] / t["transfer_s"] for t, _ in idle], "of submit to commit"),
        f"tokens_ratio_{size.key}": figure(rates, "tokens/s from submit to commit over tokens/s before"),
    }
    if native is not None:
        whole, each = native
        figures[f"native_s_{size.key}"] = figure(whole, "s, vLLM's own ipc engine, pause to resume")
        figures[f"time_over_native_{size.key}"] = figure([p / statistics.median(whole) for p in pauses], "x")
        figures[f"per_parameter_baseline_s_{size.key}"] = figure(each, "s, one call per parameter")
    return figures


def under_load(
    trainer: Trainer, peer: PeerProcess, *, rounds: int, num_requests: int
) -> tuple[list[float], list[float]]:
    """Pauses, and tokens per second during updates over those in the second before, with requests in flight."""
    peer.ask(do="load", requests=num_requests, tokens=900)
    turn, updates, pauses = threading.Event(), [], []
    turn.wait(3.0)
    for _ in range(rounds):
        turn.wait(1.5)
        updates.append(trainer.publish())
        pauses.append(peer.ask(do="last")["pause_s"])
    series = peer.ask(do="unload")["series"]
    ratios = []
    for update in updates:
        before = rate(series, update["submitted"] - 1.0, update["submitted"])
        during = rate(series, update["submitted"], update["submitted"] + update["transfer_s"])
        if before:
            ratios.append(during / before)
    return pauses, ratios


def native_seconds(trainer: Trainer, peer: PeerProcess, *, rounds: int) -> tuple[list[float], list[float]]:
    """Pause to resume of vLLM's own engine in one call, and in one call per parameter; first rounds left out."""
    update = native_info(trainer.weights)
    whole = peer.ask(do="native", update=update, each=False, rounds=rounds + 1)["seconds"][1:]
    each = peer.ask(do="native", update=update, each=True, rounds=3)["seconds"][1:]
    return whole, each


def measure_kills(folder: Path, *, on_gpu: bool, num_kills: int) -> Figures:
    """One receiver lives; beside it others get the newest version and are killed in the middle of the next one."""
    size = SIZES[0] if on_gpu else TINY
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    shapes = write_folder(size, folder / "model")
    config = bench_config(
        folder / "model", run_dir=folder, on_gpu=on_gpu, backend="scripted", deadline_s=10.0, join_deadline_s=10.0,
        bucket_mb=KILL_BUCKET_MB if on_gpu else 1,
    )  # fmt: skip
    weights = random_weights(shapes, device=device)
    if not on_gpu:
        weights["model.embed_tokens.weight"] = torch.randn(TINY.vocab * 64, TINY.hidden, dtype=torch.bfloat16)
    trainer = Trainer(config, weights)
    peers = [PeerProcess(config, "steady", trainer.publisher.address)]
    rejoin, recovery, memory, descriptors = [], [], [], []
    try:
        peers[0].wait_for("ready")
        wait_until(lambda: trainer.publisher.status()["members"], 30.0, "the first member")
        trainer.publish()
        for _ in range(num_kills):
            victim = PeerProcess(config, "victim", trainer.publisher.address, die_in=2)
            peers.append(victim)
            ready = victim.wait_for("ready")
            victim.wait_for("version", deadline_s=60.0)
            rejoin.append(next(said["time"] for said in victim.said if "version" in said) - ready)
            wait_until(lambda: len(trainer.publisher.status()["holders"]) == 2, 30.0, "both holding the version")
            recovery.append(trainer.publish()["transfer_s"])
            victim.close()
            memory.append(used_mb())
            descriptors.append(len(os.listdir("/proc/self/fd")))
        steady_version = peers[0].ask(do="last")["version"]
        assert steady_version == trainer.version, f"the living receiver has {steady_version}, not {trainer.version}"
    finally:
        for peer in peers:
            peer.close()
        trainer.publisher.close()
    return {
        "rejoin_s_max": figure([max(rejoin)], f"s, longest of {len(rejoin)} newcomers to the newest version in use"),
        "recovery_s": figure(recovery, "s from submit until the others have the version, one killed in the middle"),
        "device_memory_leak_mb": figure([memory[-1] - memory[0]], f"MB, first to last of {num_kills} kills"),
        "descriptor_leak": figure([float(descriptors[-1] - descriptors[0])], "open descriptors, likewise"),
    }


def used_mb() -> float:
    """Device memory in use by all processes (0 without a device)."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) / 1e6


def figure(values: list[float], unit: str) -> dict[str, object]:
    """One entry of the JSON."""
    spread = [min(values), max(values)]
    return {"value": statistics.median(values), "unit": unit, "spread": spread, "num_runs": len(values)}


def run(quick: bool = False) -> Figures:
    """The figures of ``slipstream bench weights``."""
    on_gpu = torch.cuda.is_available()
    wanted = os.environ.get("SLIPSTREAM_BENCH_SIZES", "0_5b,1_5b,7b").split(",")
    sizes = [size for size in SIZES if size.key in wanted] if on_gpu else [TINY]
    figures: Figures = {}
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="bench-weights-", ignore_cleanup_errors=True) as name:
            figures.update(measure_size(size, Path(name), on_gpu=on_gpu, rounds=3 if quick else 5))
        if on_gpu:
            torch.cuda.empty_cache()
        print(json.dumps(figures), file=sys.stderr, flush=True)
    if sizes:
        largest = sizes[-1].key
        figures["trainer_hold_fraction"] = figures[f"hold_fraction_{largest}"]
        figures["tokens_per_s_ratio_during_update"] = figures[f"tokens_ratio_{largest}"]
    with tempfile.TemporaryDirectory(prefix="bench-weights-", ignore_cleanup_errors=True) as name:
        figures.update(measure_kills(Path(name), on_gpu=on_gpu, num_kills=3 if quick else 10))
    if on_gpu:
        return figures
    return {key if key.endswith("_gloo") else f"{key}_gloo": value for key, value in figures.items()}


def main() -> None:
    """Prints the figures alone."""
    print(json.dumps(run(), indent=2))


if __name__ == "__main__":
    main()
