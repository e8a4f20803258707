"""A trainer starts: which batches it trains again, and from where the run goes on."""

import logging

from learner.coordinator.batches import BatchBook
from learner.coordinator.facts import RunFacts
from learner.coordinator.store import Store
from protocol.config import Config
from protocol.logs import event
from protocol.messages import BatchTrained, Refused, ResumePlan, ResumeRequest

log = logging.getLogger(__name__)


class Resume:
    """Decides on each ResumeRequest.

    * the checkpoint is the newest trained batch: nothing to replay;
    * it is older: the journalled batches after it are trained again, in order, with their recorded log-probs;
    * it is older and the operator set `learner.checkpoint.resume_from`: the later steps are abandoned (B65);
    * it is one batch newer (the trainer died before its report arrived): that batch is counted as trained now.

    A request that comes twice from one trainer process, before it asked for a batch, is one start: both answers name
    the same attempt, whichever of them arrives.
    """

    def __init__(self, config: Config, *, store: Store, book: BatchBook, facts: RunFacts) -> None:
        self._config = config
        self._store = store
        self._book = book
        self._facts = facts
        self._begun: tuple[str, ResumeRequest] | None = None

    def note_batch_request(self) -> None:
        """The newest start has had its answer."""
        self._begun = None

    def plan(self, request: ResumeRequest, *, trainer: str) -> ResumePlan | Refused:
        """The answer to a starting trainer; `trainer` is its name/incarnation."""
        self._book.num_ranks = request.num_ranks
        last = self._facts.last_batch
        if request.last_batch_id > last:
            refused = self._catch_up(request)
            if refused is not None:
                return refused
        last = self._facts.last_batch
        by_choice = self._config.learner.checkpoint.resume_from is not None
        marker = f"{self._config.learner.checkpoint.resume_from}@{request.last_batch_id}"
        if by_choice and self._store.get("resumed_from") != marker:
            self._store.put("resumed_from", marker)
            self._abandon(request)
            last = self._facts.last_batch
        replay = range(request.last_batch_id + 1, last + 1)
        missing = self._book.missing_for_replay(replay)
        if missing:
            return Refused(
                code="replay_unavailable",
                reason=f"the trainer is at batch {request.last_batch_id}, the run at {last}, and {missing}; "
                "set learner.checkpoint.resume_from to that checkpoint to abandon the later steps",
            )
        if self._begun != (trainer, request):
            self._facts.attempt += 1
            self._begun = trainer, request
        event(
            log,
            logging.INFO,
            "trainer resumes",
            attempt=self._facts.attempt,
            batch=request.last_batch_id,
            version=request.policy_version,
            replayed_batches=len(replay),
        )
        return ResumePlan(
            attempt=self._facts.attempt,
            replay=list(replay),
            published_version=self._facts.published_version,
            max_updates=self._config.run.max_updates,
        )

    def _catch_up(self, request: ResumeRequest) -> Refused | None:
        """A checkpoint holds the planned batch whose report was lost."""
        row = self._book.row(request.last_batch_id)
        if row is None or request.last_batch_id != self._facts.last_batch + 1:
            return Refused(
                code="unknown_checkpoint",
                reason=f"the trainer's checkpoint holds batch {request.last_batch_id}, this run's ledger ends at "
                f"{self._facts.last_batch}: checkpoints and ledger are of different runs (run.dir)",
            )
        ages = self._book.ages(request.last_batch_id)
        self._book.trained(
            BatchTrained(
                batch_id=request.last_batch_id,
                attempt=self._facts.attempt,
                policy_version=request.policy_version,
                num_applied=int(request.policy_version > self._facts.policy_version),
                num_skipped=0,
                replayed=False,
                num_trained_tokens=sum(ages.values()),
                num_stale_tokens=0,
                max_token_staleness=max(ages, default=0),
                trained_ages=ages,
            )
        )
        return None

    def _abandon(self, request: ResumeRequest) -> None:
        if request.last_batch_id >= self._facts.last_batch and request.policy_version >= self._facts.policy_version:
            return
        discarded = self._book.abandon_after(request.last_batch_id)
        for name, value in discarded.items():
            self._store.count(f"abandoned_{name}", value)
        self._facts.last_batch = request.last_batch_id
        self._facts.policy_version = request.policy_version
        self._facts.published_version = request.policy_version - 1  # so that the resumed version is published
        self._facts.state = "running"
