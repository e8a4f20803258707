"""Scorers: from a response and its ground truth to an outcome. They run inside worker processes (`rewardd.worker`).

Others come from packages through the entry point group `slipstream.scorers`: name -> factory(RewarddSection) -> Scorer.
A scorer never turns a fault of its own into a score: it raises, and the outcome is unjudged.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, Literal, Protocol, runtime_checkable

from msgspec import Raw, Struct, msgpack

from protocol.config.services import RewarddSection
from protocol.errors import UserError
from protocol.messages import VerdictKind

ENTRY_POINT_GROUP = "slipstream.scorers"
Lane = Literal["math", "code", "remote", "inline"]


class Task(Struct, kw_only=True, frozen=True):
    """What one answer is judged by. `truth` is the MessagePack of the decoded ground truth (text, list or mapping)."""

    scorer: str
    response: str
    truth: Raw
    extra: dict[str, Any] = {}
    time_limit_s: float | None = None
    memory_mb: int | None = None


class Outcome(Struct, kw_only=True, frozen=True):
    """What a scorer says. `value` is the correctness in [0, 1]; `has_form`: the required final-answer form is there.

    `metrics` are logged with the trajectory and count for nothing.
    """

    kind: VerdictKind
    reason: str
    value: float = 0.0
    has_form: bool = False
    isolation: str = ""
    elapsed_ms: float = 0.0
    detail: str = ""
    metrics: dict[str, float] = {}


class Canary(Struct, kw_only=True, frozen=True):
    """A pair whose verdict is known."""

    task: Task
    kind: VerdictKind


class Scorer(Protocol):
    """Attributes: `lane` names the worker pool; `pure`: the outcome depends on the task alone and may be cached.

    Lanes: math (computes; an answer that takes `deadline_s` of it is wrong), remote (asks somebody else: at the
    deadline the answer is unjudged; may offer `score_batch`, see `BatchScorer`), code (the built-in sandbox), inline
    (in the daemon, only for what takes microseconds). Workers of all but inline are killed at `deadline_s`.
    """

    name: str
    lane: Lane
    deadline_s: float
    pure: bool

    def score(self, task: Task) -> Outcome:
        """Judge one answer. ValueError = the ground truth cannot be used; any other exception = a fault."""

    def canaries(self) -> list[Canary]:
        """Known pairs, scored at the start and while serving."""


@runtime_checkable
class BatchScorer(Protocol):
    """What a scorer of the lane `remote` may offer besides `score`: several answers at once."""

    def num_in_batch(self, tasks: Sequence[Task]) -> int:
        """How many of these waiting tasks, from the first on, go into one batch; at least 1."""

    def score_batch(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Judge them, one outcome each; `deadline_s` is for the batch. An exception is a fault of all of them."""


def encode_truth(truth: Any) -> Raw:
    """A ground truth as a task carries it."""
    return Raw(msgpack.encode(truth))


def decode_truth(task: Task) -> Any:
    return msgpack.decode(task.truth)


class MathScorer:
    """`rewardd.math.verify` under the configured profile."""

    name = "math"
    lane: Lane = "math"
    pure = True

    def __init__(self, section: RewarddSection) -> None:
        self.deadline_s = section.math.deadline_s
        self._profile = section.math.profile
        self._require_box = section.math.require_box

    def score(self, task: Task) -> Outcome:
        from rewardd.math import decode_ground_truth, verify

        golds = decode_ground_truth(decode_truth(task))
        result = verify(task.response, gold=golds, profile=self._profile, require_box=self._require_box)
        return Outcome(
            kind="correct" if result.correct else "wrong",
            reason=result.reason,
            value=float(result.correct),
            has_form=result.answer is not None,
        )

    def canaries(self) -> list[Canary]:
        pairs: list[tuple[str, str, VerdictKind]] = [
            ("42", "Adding both gives $\\boxed{42}$.", "correct"),
            ("42", "Adding both gives $\\boxed{41}$.", "wrong"),
            ("\\frac{1}{2}", "The answer is \\boxed{0.5}", "correct"),
            ("2\\sqrt{2}", "So it is \\boxed{\\sqrt{8}}.", "correct"),
            ("x^2-1", "We find \\boxed{(x-1)(x+2)}.", "wrong"),
            ("7", "I cannot tell.", "wrong"),
        ]
        return [
            Canary(task=Task(scorer=self.name, response=response, truth=encode_truth(gold)), kind=kind)
            for gold, response, kind in pairs
        ]


class CodeScorer:
    """Programs in the sandbox of `rewardd.code`, one slot per worker process."""

    name = "code"
    lane: Lane = "code"
    pure = False

    def __init__(self, section: RewarddSection) -> None:
        self._section = section.code
        self.deadline_s = section.code.total_limit_s + max(10.0, section.code.time_limit_s)
        self._sandbox: Any = None

    def open(self, *, index: int) -> None:
        """Prove the isolation; raises rewardd.code's IsolationUnavailable (a ValueError) when there is none."""
        from rewardd.code import Sandbox

        self._sandbox = Sandbox(self._section.isolation, uid_base=64_000 + 2 * index)

    def score(self, task: Task) -> Outcome:
        from rewardd.code import Limits, decode_tests, run_case

        kind, tests = decode_tests(decode_truth(task))
        kind = task.extra.get("kind", kind)
        section = self._section
        limits = Limits(
            time_limit_s=min(task.time_limit_s or section.time_limit_s, section.total_limit_s),
            total_s=section.total_limit_s,
            memory_mb=task.memory_mb or section.memory_mb,
            max_processes=section.max_processes,
        )
        result = run_case(
            self._sandbox,
            kind=kind,
            response=task.response,
            program=task.extra.get("program"),
            tests=tests,
            limits=limits,
            early_exit=section.reward == "binary",
            reward=section.reward,
        )
        return Outcome(
            kind=result.verdict,
            reason=result.reason,
            value=result.pass_rate if result.verdict in ("correct", "partial") else 0.0,
            has_form=result.reason != "no_code",
            isolation=result.tier,
            detail=result.detail,
        )

    def canaries(self) -> list[Canary]:
        tests = {"inputs": ["2 3\n"], "outputs": ["5\n"]}
        programs: list[tuple[str, VerdictKind]] = [
            ("print(sum(map(int, input().split())))", "correct"),
            ("print(6)", "wrong"),
            ("import os\nos._exit(0)", "wrong"),
        ]
        return [
            Canary(
                task=Task(scorer=self.name, response=f"```python\n{program}\n```", truth=encode_truth(tests)),
                kind=kind,
            )
            for program, kind in programs
        ]


class PassthroughScorer:
    """Scores everything `extra_info.score` (default 1) without looking: for benchmarks of everything around it."""

    name = "passthrough"
    lane: Lane = "inline"
    pure = False
    deadline_s = 1.0

    def __init__(self, section: RewarddSection) -> None:
        del section

    def score(self, task: Task) -> Outcome:
        value = min(1.0, max(0.0, float(task.extra.get("score", 1.0))))
        kind: VerdictKind = "correct" if value == 1 else "partial" if value > 0 else "wrong"
        return Outcome(kind=kind, reason="passthrough", value=value, has_form=True)

    def canaries(self) -> list[Canary]:
        return []


def _reward_model(section: RewarddSection) -> Scorer:
    from rewardd.reward_model import RewardModelScorer

    return RewardModelScorer(section)


BUILT_IN: dict[str, Callable[[RewarddSection], Scorer]] = {
    "math": MathScorer,
    "code": CodeScorer,
    "passthrough": PassthroughScorer,
    "reward_model": _reward_model,
}


def make_scorers(section: RewarddSection) -> dict[str, Scorer]:
    """The built-in scorers and those that `rewardd.scorers` names.

    Raises:
        UserError: a name that no installed package offers.
    """
    built_in = dict(BUILT_IN)
    if not section.reward_model.url:
        del built_in["reward_model"]
        if "reward_model" in section.scorers.values():
            raise UserError("rewardd.scorers names reward_model: set rewardd.reward_model.url to its server")
    scorers: dict[str, Scorer] = {name: factory(section) for name, factory in built_in.items()}
    others = {key: name for key, name in section.scorers.items() if name not in scorers}
    offered = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)} if others else {}
    for key, name in others.items():
        if name not in offered:
            known = ", ".join(sorted({*BUILT_IN, *offered}))
            raise UserError(f"rewardd.scorers.{key} = {name}: no such scorer; installed are {known}")
        scorers[name] = offered[name].load()(section)
    return scorers
