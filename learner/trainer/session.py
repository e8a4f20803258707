"""The trainer's loop: resume, fetch, train, report, publish, save. Every rank runs it; rank 0 decides."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Protocol

from learner.checkpoint.manifest import read_manifest
from learner.checkpoint.store import CheckpointState, Found, abandon_after
from learner.checkpoint.writer import CheckpointWriter
from learner.trainer.batch import TrainBatch, UpdateResult
from learner.trainer.commands import Command, End, Finalise, Resume, Save, Train, Wait, any_rank, broadcast_command
from learner.trainer.coordination import Coordination, Interrupted
from learner.trainer.engine import TrainerEngine
from learner.trainer.export import export_model
from learner.trainer.memory import resident_bytes
from learner.trainer.resume import checkpoint_root, choose_checkpoint, load_checkpoint, save_state
from learner.trainer.status import TrainerStatus
from learner.trainer.stop import StopSignal
from learner.weights.snapshot import Snapshot
from protocol.config import Config
from protocol.errors import ExitStatus, UserError
from protocol.logs import event
from protocol.messages import BatchNotReady, BatchTrained, CheckpointCommitted, ResumePlan
from protocol.notify import notifier

log = logging.getLogger(__name__)

MAX_LATE_SAVES = 3


class WeightPublisher(Protocol):
    """What the session needs of ``learner.weights.publisher.Publisher``."""

    def submit(self, snapshot: Snapshot) -> None: ...

    def wait_idle(self, deadline_s: float) -> bool: ...


class Session:
    """Drives one engine with batches from the coordinator until the run ends or a stop is asked for.

    Args:
        publisher: rank 0 only.
        stop: of this rank; any rank's ends all, at the same batch.
    """

    def __init__(
        self,
        config: Config,
        *,
        engine: TrainerEngine,
        coordination: Coordination,
        publisher: WeightPublisher | None,
        status: TrainerStatus,
        stop: StopSignal,
    ) -> None:
        self._config, self._engine, self._coordination = config, engine, coordination
        self._publisher, self._status, self._stop = publisher, status, stop
        self._is_first = engine.rank == 0
        self._plan = ResumePlan(attempt=0, replay=[], published_version=0, max_updates=config.run.max_updates)
        self._submitted_batch_id = self._committed_batch_id = 0
        self._finalised_batch_id: int | None = None
        self._late_saves = 0
        self._unsaved: UserError | None = None
        self._agreed = self._stopping = False
        self._expected_wait = "generation"
        self._missing_since: float | None = None
        self._leaving: UserError | None = None
        self._writer: CheckpointWriter | None = None
        if self._is_first:
            self._writer = CheckpointWriter(
                checkpoint_root(config), config.learner.checkpoint, on_committed=self._on_committed
            )

    def run(self) -> ExitStatus:
        """Raises UserError for what a person has to mend; every rank leaves together."""
        try:
            ended = self._resume()
            while ended is None:
                notifier().progress()
                self._stopping = any_rank(self._stop.requested)
                command = broadcast_command(self._decide() if self._is_first else None)
                if isinstance(command, Train):
                    self._train(command)
                elif isinstance(command, Save):
                    self._save()
                elif isinstance(command, Finalise):
                    self._finalise(command)
                elif isinstance(command, End):
                    ended = ExitStatus(command.status)
        finally:
            notifier().stopping("saving what is left")
            self._close_writer()
        if self._leaving is not None:
            raise self._leaving
        return ended

    # ------------------------------------------------------------ rank 0 decides

    def _resume(self) -> ExitStatus | None:
        command: Command | None = None
        if self._is_first:
            found = self._choose_checkpoint()
            command = End(self._leaving.status) if self._leaving else Resume(str(found.path or ""))
        command = broadcast_command(command)
        if isinstance(command, End):
            return ExitStatus(command.status)
        assert isinstance(command, Resume)
        if command.path:
            folder = Path(command.path)
            load_checkpoint(self._engine, Found(path=folder, manifest=read_manifest(folder, verify=False)))
            self._submitted_batch_id = self._committed_batch_id = self._engine.last_batch_id
        if self._is_first:
            self._agree_with_coordinator()
        self._status.started(self._engine.policy_version)
        notifier().ready(f"policy version {self._engine.policy_version}")
        self._publish()
        return None

    def _choose_checkpoint(self) -> Found:
        try:
            found = choose_checkpoint(self._config)
        except UserError as error:
            self._leaving = error
            return Found(path=None, manifest=None)
        for line in found.skipped:
            event(log, logging.WARNING, "checkpoint passed over", checkpoint=line)
        if self._config.learner.checkpoint.resume_from is not None and found.manifest is not None:
            for name in abandon_after(checkpoint_root(self._config), step=found.manifest.step):
                event(log, logging.WARNING, "later checkpoint set aside", renamed_to=name)
        return found

    def _agree_with_coordinator(self) -> None:
        engine = self._engine
        try:
            self._plan = self._coordination.resume(
                last_batch_id=engine.last_batch_id,
                policy_version=engine.policy_version,
                num_ranks=engine.ranks.num_data,
            )
            self._agreed = True
        except UserError as error:
            self._leaving = error
        except Interrupted:
            event(log, logging.INFO, "stopped before the coordinator answered")

    def _decide(self) -> Command:
        self._coordination.tend()
        if self._leaving is not None:
            return End(self._leaving.status)
        if self._stopping:
            return self._last_act(End(ExitStatus.STOPPED), export=False)
        if self._cannot_save():
            return self._try_to_save()
        limit = self._config.trainer.memory_limit_gb * 1e9
        if limit and resident_bytes() > limit:
            event(log, logging.WARNING, "memory limit reached, saving and restarting", resident_bytes=resident_bytes())
            return self._last_act(End(ExitStatus.MEMORY_LIMIT), export=False)
        engine = self._engine
        try:
            with self._status.waiting_for(self._expected_wait):
                answer = self._coordination.next_batch(
                    after_batch_id=engine.last_batch_id, policy_version=engine.policy_version
                )
        except Interrupted:
            return Wait()
        except UserError as error:
            self._leaving = error
            return End(error.status)
        if isinstance(answer, BatchNotReady):
            return self._not_ready(answer)
        self._missing_since = None
        self._expected_wait = "generation"
        return Train(plan=answer, replayed=answer.batch_id in self._plan.replay)

    def _cannot_save(self) -> bool:
        """Whether the last save failed for what a person has to mend: training pauses then."""
        assert self._writer is not None
        if (error := self._writer.take_error()) is not None:
            self._unsaved = error
            event(log, logging.ERROR, "paused: checkpoint failed", error=str(error))
        return self._unsaved is not None

    def _try_to_save(self) -> Command:
        assert self._writer is not None and self._unsaved is not None
        with self._status.waiting_for("disk"):
            if self._stop.wait(self._config.trainer.batch_wait_s):
                return Wait()
        if not self._writer.has_room():
            event(log, logging.WARNING, "waiting", waiting_for="disk", detail=str(self._unsaved))
            return Wait()
        self._unsaved = None
        return Save()

    def _not_ready(self, answer: BatchNotReady) -> Command:
        why = answer.waiting_for
        self._expected_wait = why
        if why in ("finished", "stopped"):
            return self._last_act(End(ExitStatus.FINISHED), export=True)
        if why == "evaluating" and self._finalised_batch_id != self._engine.last_batch_id:
            return self._finalise_command(export=True)
        event(log, logging.INFO, "waiting", waiting_for=why, detail=answer.detail)
        return self._missing_peers(why)

    def _missing_peers(self, why: str) -> Command:
        run = self._config.run
        if why not in ("generators", "reward", "coordinator"):
            self._missing_since = None
            return Wait()
        now = time.monotonic()
        self._missing_since = self._missing_since or now
        if run.when_peers_missing == "exit" and now - self._missing_since > run.peers_missing_deadline_s:
            self._leaving = UserError(
                f"{why} gone for {run.peers_missing_deadline_s:g} s (run.when_peers_missing=exit)",
                status=ExitStatus.LOST_DEPENDENCY,
            )
            return self._last_act(End(ExitStatus.LOST_DEPENDENCY), export=False)
        return Wait()

    def _last_act(self, end: End, *, export: bool) -> Command:
        """What is left to save before the end, then the end."""
        done = self._finalised_batch_id == self._engine.last_batch_id
        command = self._finalise_command(export=export)
        return end if done or not (command.save or command.export) else command

    def _finalise_command(self, *, export: bool) -> Finalise:
        return Finalise(save=self._committed_batch_id != self._engine.last_batch_id, export=export)

    # ------------------------------------------------------------ all ranks act

    def _train(self, command: Train) -> None:
        engine, plan = self._engine, command.plan
        try:
            with self._status.waiting_for("shard"):
                arrays = self._coordination.shard(
                    batch_id=plan.batch_id, rank=engine.ranks.data_rank, num_ranks=engine.ranks.num_data
                )
        except (Interrupted, UserError) as failure:
            arrays = None
            if isinstance(failure, UserError):
                self._leaving = failure
        if any_rank(arrays is None):
            return  # the batch is journalled: it is handed out again
        assert arrays is not None
        with self._status.working("training"):
            result = engine.train_batch(TrainBatch(plan=plan, arrays=arrays))
        self._status.progressed(result)
        if self._writer is not None:
            self._writer.protected_step = plan.protected_batch_id
            self._report(command, result)
        with self._status.working("publishing"):
            self._publish()
        if engine.last_batch_id - self._submitted_batch_id >= self._config.learner.checkpoint.every_updates:
            with self._status.working("saving"):
                self._save()

    def _report(self, command: Train, result: UpdateResult) -> None:
        body = BatchTrained(
            batch_id=command.plan.batch_id,
            attempt=self._plan.attempt,
            policy_version=result.policy_version,
            num_applied=result.num_applied,
            num_skipped=result.num_skipped,
            replayed=command.replayed,
            num_trained_tokens=result.num_trained_tokens,
            num_stale_tokens=result.num_stale_tokens,
            max_token_staleness=result.max_token_staleness,
            trained_ages=result.trained_ages,
            metrics=result.metrics,
        )
        try:
            with self._status.waiting_for("coordinator"):
                self._coordination.report(body)
        except Interrupted:
            self._coordination.tell(body)
        except UserError as error:
            self._leaving = error
        limit = self._config.run.max_skipped_updates
        if result.num_skipped_in_a_row >= limit:
            self._leaving = UserError(
                f"{result.num_skipped_in_a_row} updates in a row were skipped (run.max_skipped_updates): their "
                "gradients were not finite or no token was fresh enough; look at actor/grad_norm and staleness, lower "
                "learner.optim.lr, or resume from an earlier checkpoint",
                status=ExitStatus.NO_PROGRESS,
            )

    def _publish(self) -> None:
        """Hands the version to the publisher, unless generators are ahead of it or start with it (version 0)."""
        version = self._engine.policy_version
        published = self._plan.published_version
        is_due = self._agreed and version >= published and (version > 0 or published < 0)
        if not any_rank(is_due and self._is_first):
            return
        snapshot = self._engine.gather_snapshot()
        if snapshot is None or self._publisher is None:
            return
        self._publisher.submit(snapshot)
        if self._config.weights.wait_for_generators:
            with self._status.waiting_for("weights"):
                self._publisher.wait_idle(self._config.weights.deadline_s)

    def _save(self) -> None:
        if any_rank(not self._last_save_is_done()):
            return  # the snapshot's memory is still being written from
        state = save_state(self._engine, attempt=self._plan.attempt)
        self._submitted_batch_id = self._engine.last_batch_id
        if self._writer is None or state is None:
            return
        try:
            self._writer.submit(state, deadline_s=self._config.trainer.collective_timeout_s)
        except UserError as error:
            self._unsaved = error
        except TimeoutError as error:
            self._save_is_late(error)

    def _last_save_is_done(self) -> bool:
        """Waits for the save before this one, and counts it when it failed."""
        if self._writer is None:
            return True
        try:
            self._writer.wait(deadline_s=self._config.trainer.collective_timeout_s)
        except UserError as error:
            self._unsaved = error
        except TimeoutError as error:
            self._save_is_late(error)
        return not self._writer.busy

    def _save_is_late(self, error: TimeoutError) -> None:
        """Training goes on; the third save in a row that does not end ends the trainer."""
        self._late_saves += 1
        event(log, logging.ERROR, "checkpoint is late", error=str(error), late_in_a_row=self._late_saves)
        if self._late_saves >= MAX_LATE_SAVES:
            self._leaving = UserError(str(error), status=ExitStatus.DISK_FULL)

    def _finalise(self, command: Finalise) -> None:
        engine = self._engine
        with self._status.working("saving"):
            if command.save:
                self._save()
            snapshot = engine.gather_snapshot() if command.export else None
            self._finalised_batch_id = engine.last_batch_id
            if self._writer is None:
                return
            try:
                self._writer.wait(deadline_s=self._config.trainer.collective_timeout_s)
                if snapshot is not None:
                    self._export(snapshot)
            except UserError as error:
                if self._stopping:
                    self._leaving = error
                else:  # pause until it can be saved, then finish
                    self._unsaved, self._finalised_batch_id = error, None
            except TimeoutError as error:
                self._leaving = UserError(str(error))

    def _export(self, snapshot: Snapshot) -> None:
        model = self._config.model
        target = Path(self._config.run.dir) / "export"
        try:
            export_model(
                snapshot, source=Path(model.path), tokenizer=Path(model.tokenizer_path or model.path), target=target
            )
        except OSError as error:
            raise UserError(f"export to {target} failed: {error}", status=ExitStatus.DISK_FULL) from error
        event(log, logging.INFO, "exported", path=str(target), policy_version=snapshot.policy_version)

    def _on_committed(self, state: CheckpointState, folder: Path) -> None:
        version = state.scalars["engine"]["policy_version"]
        self._committed_batch_id, self._late_saves = state.step, 0
        event(log, logging.INFO, "checkpoint committed", path=folder.name, policy_version=version)
        self._coordination.tell(
            CheckpointCommitted(batch_id=state.step, policy_version=version, path=str(folder.absolute()))
        )

    def _close_writer(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close(deadline_s=self._config.deploy.stop_grace_s)
            except (UserError, TimeoutError) as error:
                event(log, logging.ERROR, "checkpoint failed", error=str(error))
