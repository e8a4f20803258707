"""A coordinator without sockets, with a simulated clock and scripted roles that speak its real messages."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from learner.coordinator.journal import Journal
from learner.coordinator.metrics import RecordFile
from learner.coordinator.schema import ledger_summary, open_database
from learner.coordinator.service import Coordinator, Outgoing
from learner.coordinator.store import Store
from learner.data import PromptSet, load_prompts
from learner.data.tokenization import PromptTokenizer, TokenizerFacts
from protocol import messages as m
from protocol.config import Config
from tests.support.tiny_model import build_tiny_tokenizer

FACTS = TokenizerFacts(vocab_size=259, stop_token_ids=(258,))


def rows(num: int, *, source: str = "toy", start: int = 0) -> list[dict[str, Any]]:
    """Rows as in the data sets: `num` sums."""
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{source} {i} + 1 = ?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i},
        }
        for i in range(start, start + num)
    ]


def tokenizer_folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    if not (path / "tokenizer.json").exists():
        build_tiny_tokenizer(path)
        (path / "config.json").write_text(json.dumps({"eos_token_id": 258}))
    return path


def make_config(folder: Path, **overrides: Any) -> Config:
    """B = 2 groups of 2, eta 1, no evaluation; `overrides` replace whole dotted keys, e.g. {"run.max_updates": 3}."""
    tree: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "max_updates": 4},
        "model": {"path": str(tokenizer_folder(folder / "model"))},
        "data": {"train_files": [str(folder / "train.jsonl")]},
        "sampling": {"max_response_tokens": 64},
        "learner": {"groups_per_batch": 2, "group_size": 2, "max_tokens_per_micro_batch": 256},
        "evaluation": {"at_start": False, "at_end": False},
        "coordinator": {"listen": "tcp://127.0.0.1:0", "lease_deadline_s": 10.0},
        "transport": {"heartbeat_s": 0.2, "peer_timeout_s": 2.0},
    }
    for dotted, value in overrides.items():
        *sections, key = dotted.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return Config.model_validate(tree)


def prompt_set(folder: Path, data: list[dict[str, Any]]) -> PromptSet:
    tokenizer = PromptTokenizer(tokenizer_folder(folder / "model"))
    return load_prompts([data], tokenizer=tokenizer, max_prompt_tokens=512)


@dataclass
class Harness:
    """Opens, crashes and reopens one coordinator; `sent` holds what it sent after the last commit, by peer."""

    folder: Path
    config: Config
    train: PromptSet
    evaluation: PromptSet | None = None
    now: float = 1000.0
    sent: list[Outgoing] = field(default_factory=list)
    msg_id: int = 0

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        run = Path(self.config.run.dir)
        self.store = Store(open_database(run / "coordinator" / "ledger.sqlite"))
        self.journal = Journal(run / "coordinator" / "segments", segment_bytes=self.config.coordinator.segment_mb << 20)
        self.coordinator = Coordinator(
            self.config,
            train=self.train,
            evaluation=self.evaluation,
            tokenizer=FACTS,
            tokenizer_hash=None,
            shape=None,
            store=self.store,
            journal=self.journal,
            metrics=RecordFile(run / "metrics.jsonl"),
            evaluations=RecordFile(run / "eval.jsonl"),
            clock=lambda: self.now,
        )

    def crash(self) -> None:
        """As kill -9: what is not committed is lost; then a new start."""
        self.store.connection.close()
        self.open()

    def join(self, role: str, name: str, *, incarnation: str = "1", **attributes: Any) -> str:
        hello = m.Hello(
            role=role,  # type: ignore[arg-type]
            name=name,
            incarnation=incarnation,
            protocol_version=m.PROTOCOL_VERSION,
            host="here",
            pid=1,
            attributes=attributes,
        )
        assert isinstance(self.coordinator.accept(hello), m.Welcome)
        return f"{name}/{incarnation}"

    def give(self, key: str, body: Any, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Hands one message over without committing."""
        self.msg_id += 1
        self.coordinator.handle(key, body, arrays or {}, msg_id=self.msg_id)

    def turn(self) -> list[Outgoing]:
        """Tick, commit, send."""
        self.coordinator.tick()
        self.coordinator.commit()
        self.sent = self.coordinator.take_outbox()
        return self.sent

    def ask(self, key: str, body: Any, arrays: Mapping[str, np.ndarray] | None = None) -> Any:
        """One message, one turn; the body of the answer (None while parked)."""
        self.give(key, body, arrays)
        mine = self.msg_id
        return next((out.body for out in self.turn() if out.reply_to == mine), None)

    def lease(self, key: str, max_slots: int = 100, version: int = 0) -> list[m.Lease]:
        return self.ask(key, m.LeaseRequest(max_slots=max_slots, policy_version=version)).leases

    def summary(self) -> dict[str, int | bool]:
        return ledger_summary(self.store.connection)

    def update(self, trainer: str, *, version: int, applied: int = 1) -> m.BatchPlan:
        """The trainer asks for the next batch, trains it, reports it."""
        plan = self.ask(
            trainer, m.BatchRequest(after_batch_id=self.coordinator.facts.last_batch, policy_version=version, wait_s=1)
        )
        assert isinstance(plan, m.BatchPlan), plan
        self.ask(trainer, trained(plan, applied=applied))
        return plan


def trained(
    plan: m.BatchPlan,
    *,
    attempt: int = 1,
    applied: int = 1,
    replayed: bool = False,
    ages: dict[int, int] | None = None,
    **metrics: float,
) -> m.BatchTrained:
    return m.BatchTrained(
        batch_id=plan.batch_id,
        attempt=attempt,
        policy_version=plan.policy_version + min(1, applied),
        num_applied=applied,
        num_skipped=1 - applied,
        replayed=replayed,
        num_trained_tokens=1,
        num_stale_tokens=0,
        max_token_staleness=0,
        trained_ages=ages or {},
        metrics=metrics,
    )


def answer(
    lease: m.Lease,
    slot: int,
    *,
    score: float = 1.0,
    num_tokens: int = 5,
    versions: list[int] | None = None,
    kind: str | None = None,
    generator: str = "g",
    **changes: Any,
) -> tuple[m.ScoredTrajectory, dict[str, np.ndarray]]:
    """A scored trajectory of one leased slot, and its arrays."""
    num_prompt = len(lease.prompt_token_ids)
    fields: dict[str, Any] = {
        "group_id": lease.group_id,
        "slot": slot,
        "attempt": lease.attempt,
        "prompt_id": lease.prompt_id,
        "generator": generator,
        "purpose": lease.purpose,
        "stage": lease.stage,
        "num_prompt_tokens": num_prompt,
        "num_response_tokens": num_tokens,
        "finish_reason": "stop",
        "stop_reason": "258",
        "sampling": lease.sampling,
        "response_text": "text",
        "tokenizer_hash": "",
        "seconds": 1.0,
    }
    trajectory = m.Trajectory(**(fields | changes))
    verdict = m.Verdict(
        kind=kind or ("correct" if score >= 1.0 else "wrong" if score == 0.0 else "partial"),  # type: ignore[arg-type]
        score=score,
        reason="test",
        scorer="test",
        elapsed_ms=1.0,
    )
    response = np.full(num_tokens, 65 + slot, dtype="<i4")
    arrays = {
        "token_ids": np.concatenate([np.asarray(lease.prompt_token_ids, dtype="<i4"), response]),
        "logp_behaviour": np.full(num_tokens, -0.5, dtype="<f4"),
        "versions": np.asarray(versions if versions is not None else [lease.min_version] * num_tokens, dtype="<i4"),
        "loss_mask": np.ones(num_tokens, dtype="|u1"),
    }
    return m.ScoredTrajectory(trajectory=trajectory, verdict=verdict, rewardd="r"), arrays
