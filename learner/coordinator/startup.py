"""What the coordinator does before it serves: lock the run folder, load and check the data, choose a clock."""

import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from learner.coordinator.schema import refuse_network_filesystem
from learner.data.dataset import PromptSet, check_overlap, load_prompts
from learner.data.tokenization import PromptTokenizer
from protocol.config import Config
from protocol.errors import UserError
from protocol.logs import event

log = logging.getLogger(__name__)


def lock_run_folder(folder: Path) -> IO[str]:
    """Holds the run folder for this process. Raises UserError when another coordinator has it, or it is unusable."""
    refuse_network_filesystem(folder)
    path = folder / "coordinator" / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; run.dir must be a writable folder") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip()
        raise UserError(f"run.dir {folder} is in use by another coordinator (pid {holder}); stop it first") from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def load_data(config: Config, tokenizer: PromptTokenizer) -> tuple[PromptSet, PromptSet | None]:
    """Training and held-out prompts, checked; rows that are left out are named in the log."""
    limit = config.data.max_prompt_tokens
    train = load_prompts(config.data.train_files, tokenizer=tokenizer, max_prompt_tokens=limit)
    held_out = None
    if config.data.eval_files:
        held_out = load_prompts(config.data.eval_files, tokenizer=tokenizer, max_prompt_tokens=limit)
        common = check_overlap(train, held_out, max_fraction=config.data.max_eval_overlap)
        for prompt in common:
            event(log, logging.WARNING, "evaluation prompt is in the training data", prompt_id=prompt.prompt_id)
    for prompts in (train, held_out):
        for item in prompts.left_out if prompts is not None else ():
            event(log, logging.WARNING, "row left out", file=item.file, row=item.row, reason=item.reason)
    return train, held_out


def wall_anchored_clock() -> Callable[[], float]:
    """Seconds since the epoch at the start, monotonic from then on (a clock that is set back disturbs no deadline)."""
    base = time.time() - time.monotonic()
    return lambda: base + time.monotonic()
