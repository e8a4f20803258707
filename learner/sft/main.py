"""`slipstream sft`: one rank of a supervised warm start. Its export is what ``model.path`` of a run takes."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import torch

from learner.checkpoint.store import CheckpointState
from learner.checkpoint.writer import CheckpointWriter
from learner.coordinator.metrics import RecordFile
from learner.data.tokenization import PromptTokenizer
from learner.packing import ModelShape, model_shape, pack
from learner.sft.conversations import Conversations, batch_rows, load_conversations, steps_per_epoch
from learner.trainer.batch import TrainBatch, TrajectoryArrays, UpdateResult
from learner.trainer.commands import any_rank
from learner.trainer.engine import TrainerEngine, choose_device
from learner.trainer.export import export_model
from learner.trainer.resume import checkpoint_root, choose_checkpoint, load_checkpoint, save_state
from learner.trainer.stop import StopSignal
from protocol.config import Config
from protocol.config.learner import AlgorithmSection, BehaviourSection
from protocol.errors import ExitStatus, UserError
from protocol.logs import event, setup_logging
from protocol.messages import BatchItem, BatchPlan

log = logging.getLogger(__name__)

METRICS = {
    "actor/entropy_loss": "sft/loss",
    "actor/entropy": "sft/entropy",
    "actor/grad_norm": "sft/grad_norm",
    "actor/lr": "sft/lr",
    "learner/trained_tokens": "sft/tokens",
    "perf/throughput": "perf/throughput",
    "perf/mfu/actor": "perf/mfu/actor",
}


def engine_config(config: Config, *, num_steps: int) -> Config:
    """The engine's settings: mean negative log-likelihood, which is REINFORCE with advantage 1 and no ratio."""
    algorithm = AlgorithmSection(max_staleness=0, loss="reinforce", behaviour=BehaviourSection(level="off"))
    run = config.run.model_copy(update={"dir": str(Path(config.run.dir) / "sft"), "max_updates": num_steps})
    learner = config.learner.model_copy(update={"mini_batches": 1, "optim": config.sft.optim})
    return config.model_copy(update={"run": run, "learner": learner, "algorithm": algorithm})


def plan_batch(
    conversations: Conversations, *, step: int, config: Config, num_data: int, shape: ModelShape | None
) -> TrainBatch:
    """The step-th batch (from 0); every rank computes the same plan."""
    rows = batch_rows(
        step,
        num_rows=len(conversations.rows),
        batch_size=config.sft.sequences_per_batch,
        seed=config.run.seed,
    )
    items, arrays = [], {}
    for index, row in enumerate(rows):
        conversation = conversations.rows[row]
        num_response = len(conversation.token_ids) - 1
        item = BatchItem(
            group_id=row, slot=0, prompt_id=f"row {row}", data_source="sft", num_prompt_tokens=1,
            num_response_tokens=num_response, score=1.0, verdict="correct", finish_reason="stop",
            min_version=0, max_version=0, temperature=1.0, stage=0,
        )  # fmt: skip
        items.append(item)
        arrays[index] = TrajectoryArrays(
            token_ids=conversation.token_ids,
            logp_behaviour=np.zeros(num_response, np.float32),
            versions=np.full(num_response, np.iinfo(np.int32).max, np.int32),
            loss_mask=conversation.own[1:].astype(np.uint8),
        )
    lengths = [len(conversations.rows[row].token_ids) for row in rows]
    packed = pack(lengths, max_tokens=config.learner.micro_batch_tokens, num_ranks=num_data, flops=shape or float)
    plan = BatchPlan(
        batch_id=step + 1,
        policy_version=step,
        stage=0,
        items=items,
        micro_batches=[[list(micro_batch) for micro_batch in rank] for rank in packed.micro_batches],
        fill_fraction=packed.fill_fraction,
        oldest_age_s=0.0,
    )
    return TrainBatch(plan=plan, arrays=arrays, advantages=np.ones(len(items)))


class WarmStart:
    """Trains, saves, resumes and exports; all ranks run it in step, rank 0 writes."""

    def __init__(self, config: Config, *, conversations: Conversations, rank: int, num_ranks: int, stop: StopSignal):
        per_epoch = steps_per_epoch(len(conversations.rows), batch_size=config.sft.sequences_per_batch)
        self._conversations, self._stop = conversations, stop
        self._num_steps = per_epoch * config.sft.epochs
        self._config = engine_config(config, num_steps=self._num_steps)
        self._shape = model_shape(config.model.path)
        self._root = checkpoint_root(self._config)
        self.engine = TrainerEngine(
            self._config, rank=rank, num_ranks=num_ranks, device=choose_device(self._config, rank=rank)
        )
        self._writer: CheckpointWriter | None = None
        self._records: RecordFile | None = None
        self._saved = 0
        if rank == 0:
            self._writer = CheckpointWriter(self._root, config.learner.checkpoint, on_committed=self._on_committed)
            self._records = RecordFile(Path(self._config.run.dir) / "metrics.jsonl")

    def run(self) -> ExitStatus:
        """Raises UserError when a checkpoint is of other data, a save fails, or updates are skipped in a row."""
        self._resume()
        engine = self.engine
        while engine.last_batch_id < self._num_steps:
            if any_rank(self._stop.requested):
                self._save()
                self._close()
                return ExitStatus.STOPPED
            batch = plan_batch(
                self._conversations,
                step=engine.last_batch_id,
                config=self._config,
                num_data=engine.ranks.num_data,
                shape=self._shape,
            )
            self._report(engine.train_batch(batch))
            if engine.last_batch_id - self._saved >= self._config.learner.checkpoint.every_updates:
                self._save()
        self._save()
        self._export()
        self._close()
        return ExitStatus.FINISHED

    def _resume(self) -> None:
        found = choose_checkpoint(self._config)
        if found.path is None or found.manifest is None:
            return
        if found.manifest.scalars.get("sft_data") != self._conversations.content_hash:
            raise UserError(
                f"checkpoint {found.path} was trained on other data: restore sft.files, or set "
                "learner.checkpoint.resume=never"
            )
        load_checkpoint(self.engine, found)
        self._saved = self.engine.last_batch_id

    def _report(self, result: UpdateResult) -> None:
        if result.num_skipped_in_a_row >= self._config.run.max_skipped_updates:
            raise UserError(
                f"{result.num_skipped_in_a_row} updates in a row had gradients that are not finite: lower sft.optim.lr",
                status=ExitStatus.NO_PROGRESS,
            )
        if self._records is None:
            return
        named = {name: result.metrics[key] for key, name in METRICS.items() if key in result.metrics}
        self._records.append({"step": self.engine.last_batch_id, "num_steps": self._num_steps} | named)
        event(log, logging.INFO, "step", step=self.engine.last_batch_id, of=self._num_steps, loss=named.get("sft/loss"))

    def _save(self) -> None:
        deadline_s = self._config.trainer.collective_timeout_s
        if self._saved == self.engine.last_batch_id:
            return
        self._saved = self.engine.last_batch_id
        if self._writer is not None:
            self._writer.wait(deadline_s=deadline_s)  # the snapshot's memory is the engine's
        state = save_state(self.engine, attempt=1)
        if self._writer is not None and state is not None:
            state.scalars["sft_data"] = self._conversations.content_hash
            self._writer.submit(state, deadline_s=deadline_s)

    def _on_committed(self, state: CheckpointState, folder: Path) -> None:
        event(log, logging.INFO, "checkpoint committed", path=folder.name, step=state.step)

    def _export(self) -> None:
        snapshot = self.engine.gather_snapshot()
        if snapshot is None:
            return
        model = self._config.model
        source = Path(model.path)
        target = Path(self._config.run.dir) / "export"
        export_model(snapshot, source=source, tokenizer=Path(model.tokenizer_path or source), target=target)
        event(log, logging.INFO, "exported", path=str(target))

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close(deadline_s=self._config.trainer.collective_timeout_s)
        if self._records is not None:
            self._records.close()


def run(config: Config, *, name: str) -> ExitStatus:
    """Runs this rank (RANK and WORLD_SIZE of the environment) to the export, or to a checkpoint after a signal."""
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    setup_logging("sft", name if num_ranks == 1 else f"{name}/{rank}")
    if not config.sft.files:
        raise UserError("sft.files names no file: give parquet or JSON lines with a column `messages`")
    stop = StopSignal()
    stop.install()
    tokenizer = PromptTokenizer(
        config.model.tokenizer_path or config.model.path, template_kwargs=config.model.chat_template_kwargs
    )
    conversations = load_conversations(
        config.sft.files, tokenizer=tokenizer, max_tokens=config.learner.micro_batch_tokens
    )
    if rank == 0:
        for line in conversations.left_out[:20]:
            event(log, logging.WARNING, "row left out", reason=line)
        event(log, logging.INFO, "data", rows=len(conversations.rows), left_out=len(conversations.left_out))
    if config.trainer.threads_per_rank:
        torch.set_num_threads(config.trainer.threads_per_rank)
    try:
        return WarmStart(config, conversations=conversations, rank=rank, num_ranks=num_ranks, stop=stop).run()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
