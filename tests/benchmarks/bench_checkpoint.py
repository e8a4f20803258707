"""Checkpoints: how long training stands still for one, how long the write takes, and what resuming changes.

``run(quick)`` gives the figures of ``slipstream bench checkpoint``; run as a script it prints them as JSON. The stall
is the time that the training loop cannot go on for a save: gathering the shards into a snapshot and handing it over.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from learner.checkpoint.store import CheckpointState, newest_committed
from learner.checkpoint.writer import CheckpointWriter
from learner.trainer.engine import TrainerEngine
from learner.trainer.resume import load_checkpoint, save_state
from protocol.config.learner import CheckpointSection
from tests.benchmarks.bench_learner import CPU_CASE, GPU_CASE, build_batch, build_model, engine_config, figure, release

SMALL = replace(CPU_CASE, hidden=512, intermediate=1536, layers=6, vocab=16_384, heads=8, num_tokens=128)
DEADLINE_S = 600.0


class Saves:
    """Saves an engine's state in the background and keeps the times."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.committed_at: dict[int, float] = {}
        self.stall_s: dict[int, float] = {}
        self.begun_at: dict[int, float] = {}
        self._writer = CheckpointWriter(root, CheckpointSection(min_free_gb=0.0, keep=1), on_committed=self._committed)

    def _committed(self, state: CheckpointState, folder: Path) -> None:
        self.committed_at[state.step] = time.perf_counter()

    def save(self, engine: TrainerEngine) -> None:
        """What the training loop does for a save."""
        step = engine.last_batch_id
        self.begun_at[step] = time.perf_counter()
        state = save_state(engine, attempt=1)
        assert state is not None
        self._writer.submit(state, deadline_s=DEADLINE_S)
        self.stall_s[step] = time.perf_counter() - self.begun_at[step]

    def wait(self) -> None:
        self._writer.wait(deadline_s=DEADLINE_S)

    def write_s(self, step: int) -> float:
        return self.committed_at[step] - self.begun_at[step]

    def close(self) -> None:
        self._writer.close(deadline_s=DEADLINE_S)


def run(quick: bool = False) -> dict[str, dict[str, object]]:
    """Figures ``stall_fraction``, ``save_s``, ``resume_loss_max_abs_diff`` and the checkpoint's size."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    case = GPU_CASE if device.type == "cuda" else SMALL
    num_saves, num_after = (2, 2) if quick else (5, 4)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        build_model(case, model, device=device)
        release(device)
        config = engine_config(case, model, device=device, share=1.0, liger=False)
        engine = TrainerEngine(config, rank=0, num_ranks=1, device=device)
        saves = Saves(Path(folder) / "checkpoints")
        steps = []
        for number in range(num_saves):
            engine.train_batch(build_batch(case, step=number))
            steps.append(engine.last_batch_id)
            saves.save(engine)
            saves.wait()
        expected = [engine.train_batch(build_batch(case, step=num_saves + i)) for i in range(num_after)]
        engine.close()
        del engine
        release(device)
        saves.close()
        size = sum(file.stat().st_size for file in saves.root.rglob("*") if file.is_file())
        resumed = TrainerEngine(config, rank=0, num_ranks=1, device=device)
        load_checkpoint(resumed, newest_committed(saves.root))
        losses = [resumed.train_batch(build_batch(case, step=num_saves + i)) for i in range(num_after)]
        resumed.close()
    pairs = zip(expected, losses, strict=True)
    differences = [abs(a.metrics["actor/loss"] - b.metrics["actor/loss"]) for a, b in pairs]
    difference = figure(differences, f"nats, losses of {num_after} updates after resuming")
    return {
        "stall_fraction": figure([saves.stall_s[s] / saves.write_s(s) for s in steps], "of the time of the save"),
        "save_s": figure([saves.write_s(s) for s in steps], f"s for {size / 1e9:.2f} GB"),
        "resume_loss_max_abs_diff": difference | {"value": max(differences)},
        "stall_s": figure([saves.stall_s[s] for s in steps], "s"),
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
