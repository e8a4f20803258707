"""Writes checkpoints on a thread of its own while training goes on."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from learner.checkpoint.store import CheckpointState, has_room, write_checkpoint
from protocol.config.learner import CheckpointSection
from protocol.errors import UserError

log = logging.getLogger(__name__)


class CheckpointWriter:
    """One save at a time; a save asked for while another runs waits for it.

    ``protected_step``: the newest checkpoint up to it is not pruned (-1: none is spared).
    ``on_committed(state, folder)`` runs on the writing thread. ``take_error`` and ``wait`` tell of a failed save, once.
    """

    def __init__(
        self, root: Path, section: CheckpointSection, *, on_committed: Callable[[CheckpointState, Path], None]
    ) -> None:
        self._root, self._section, self._on_committed = root, section, on_committed
        self._queue: queue.Queue[CheckpointState | None] = queue.Queue(maxsize=1)
        self._idle = threading.Condition()
        self._pending = 0
        self._error: UserError | None = None
        self._last_bytes = 0
        self.protected_step = -1
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._pending > 0

    def submit(self, state: CheckpointState, *, deadline_s: float) -> None:
        """Takes over ``state``; blocks while an earlier save runs, and until this one is done unless in background.

        Raises TimeoutError, and UserError when this save failed and is not in background.
        """
        self._wait_idle(deadline_s)
        self._last_bytes = state.num_bytes
        with self._idle:
            self._pending += 1
        self._queue.put(state)
        if not self._section.in_background:
            self.wait(deadline_s=deadline_s)

    def has_room(self) -> bool:
        """Whether a save as large as the last one would find room on the disk now."""
        return has_room(self._root, needed=self._last_bytes, min_free_bytes=int(self._section.min_free_gb * 1e9))

    def take_error(self) -> UserError | None:
        """The error of the last save that failed since this was asked; does not wait."""
        with self._idle:
            error, self._error = self._error, None
        return error

    def wait(self, *, deadline_s: float) -> None:
        """Until nothing is being written. Raises TimeoutError, or the error of a failed save."""
        self._wait_idle(deadline_s)
        if (error := self.take_error()) is not None:
            raise error

    def _wait_idle(self, deadline_s: float) -> None:
        with self._idle:
            if not self._idle.wait_for(lambda: self._pending == 0, timeout=deadline_s):
                raise TimeoutError(f"a checkpoint is still being written to {self._root} after {deadline_s:.0f} s")

    def close(self, *, deadline_s: float) -> None:
        """Finishes the save in hand and ends the thread."""
        try:
            self.wait(deadline_s=deadline_s)
        finally:
            self._queue.put(None)
            self._thread.join(timeout=deadline_s)

    def _run(self) -> None:
        while (state := self._queue.get()) is not None:
            error: UserError | None = None
            try:
                folder = write_checkpoint(
                    self._root,
                    state,
                    keep=self._section.keep,
                    min_free_bytes=int(self._section.min_free_gb * 1e9),
                    protected_step=self.protected_step,
                )
                self._on_committed(state, folder)
            except UserError as failed:
                error = failed
                log.error("%s", failed)
            except Exception as failed:
                error = UserError(f"checkpoint of step {state.step} failed: {failed!r}")
                log.exception("checkpoint of step %d failed", state.step)
            del state  # free the host copy before the next one is taken
            with self._idle:
                self._error = error or self._error
                self._pending -= 1
                self._idle.notify_all()
