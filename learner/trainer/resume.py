"""From the engine to a checkpoint and back."""

from __future__ import annotations

import logging
from pathlib import Path

from learner.checkpoint.manifest import read_manifest
from learner.checkpoint.store import CheckpointState, Found, newest_committed, open_tensors
from learner.trainer.engine import TrainerEngine
from learner.trainer.rng import gather_rng, restore_rng
from protocol.config import Config
from protocol.errors import UserError
from protocol.logs import event

log = logging.getLogger(__name__)


def save_state(engine: TrainerEngine, *, attempt: int) -> CheckpointState | None:
    """All ranks take part; rank 0 gets the state at this batch boundary, on the host and its own.

    ``attempt`` numbers the lineage; the checkpoint also names the ``resume_from`` the lineage began with.
    """
    tensors = engine.gather_state() | gather_rng(device=engine.device)
    if engine.rank != 0:
        return None
    scalars = {
        "engine": engine.scalars(),
        "attempt": attempt,
        "num_ranks": engine.num_ranks,
        "run_name": engine.config.run.name,
        "resumed_from": engine.config.learner.checkpoint.resume_from,
        "shapes": {name: list(shape) for name, shape in engine.shapes().items()},
    }
    return CheckpointState(step=engine.last_batch_id, tensors=tensors, scalars=scalars)


def choose_checkpoint(config: Config) -> Found:
    """The checkpoint this start resumes from, and which newer ones were passed over and why.

    With ``learner.checkpoint.resume_from`` it is that one, at the first start; later starts of the same lineage take
    the newest checkpoint that grew out of it. Raises UserError when the named folder is not a whole checkpoint.
    """
    section = config.learner.checkpoint
    root = checkpoint_root(config)
    if section.resume == "never" and section.resume_from is None:
        return Found(path=None, manifest=None)
    newest = newest_committed(root)
    if section.resume_from is None:
        return newest
    if newest.manifest is not None and newest.manifest.scalars.get("resumed_from") == section.resume_from:
        return newest
    folder = Path(section.resume_from)
    try:
        return Found(path=folder, manifest=read_manifest(folder))
    except (ValueError, OSError) as error:
        raise UserError(f"learner.checkpoint.resume_from {folder} is not a whole checkpoint: {error}") from error


def checkpoint_root(config: Config) -> Path:
    """Folder of the run's checkpoints."""
    return Path(config.run.dir) / "checkpoints"


def load_checkpoint(engine: TrainerEngine, found: Found) -> int:
    """Restores the engine from a checkpoint, whatever the number of ranks that wrote it; returns its attempt.

    Every rank reads the folder. Raises UserError, before anything is changed, when it is of another model.
    """
    assert found.path is not None and found.manifest is not None
    scalars = found.manifest.scalars
    own = {name: list(shape) for name, shape in engine.shapes().items()}
    saved = scalars["shapes"]
    if saved != own:
        differing = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
        name = differing[0]
        raise UserError(
            f"checkpoint {found.path} is of another model: {name} is {saved.get(name)} there and {own.get(name)} in "
            f"model.path ({len(differing)} tensors differ); set model.path or learner.checkpoint.resume=never"
        )
    read = open_tensors(found.path)
    engine.restore(scalars["engine"], read=read)
    restore_rng(read, rank=engine.rank, device=engine.device)
    event(
        log,
        logging.INFO,
        "resumed",
        checkpoint=found.path.name,
        policy_version=engine.policy_version,
        saved_by_ranks=scalars["num_ranks"],
        num_ranks=engine.num_ranks,
    )
    return int(scalars["attempt"])
