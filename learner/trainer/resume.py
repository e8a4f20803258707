"""From the engine to a checkpoint and back."""

from __future__ import annotations

import logging

from learner.checkpoint.store import CheckpointState, Found, open_tensors
from learner.trainer.engine import TrainerEngine
from learner.trainer.rng import gather_rng, restore_rng
from protocol.errors import UserError
from protocol.logs import event

log = logging.getLogger(__name__)


def save_state(engine: TrainerEngine, *, attempt: int) -> CheckpointState | None:
    """All ranks take part; rank 0 gets the state at this batch boundary, on the host and its own."""
    tensors = engine.gather_state() | gather_rng(device=engine.device)
    if engine.rank != 0:
        return None
    scalars = {
        "engine": engine.scalars(),
        "attempt": attempt,
        "num_ranks": engine.num_ranks,
        "run_name": engine.config.run.name,
        "shapes": {name: list(shape) for name, shape in engine.shapes().items()},
    }
    return CheckpointState(step=engine.last_batch_id, tensors=tensors, scalars=scalars)


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
    kinds = ["cpu", "cuda"] if engine.device.type == "cuda" else ["cpu"]
    if engine.rank < scalars["num_ranks"]:
        names = [f"rng/{kind}/{engine.rank}" for kind in kinds]
        restore_rng({n: read(n) for n in names}, rank=engine.rank, device=engine.device)
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
