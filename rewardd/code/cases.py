"""From a response and a test set to a verdict."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from rewardd.code import asserts
from rewardd.code.compare import Comparison, outputs_equal, values_equal
from rewardd.code.decode import Kind
from rewardd.code.execution import Run, Status, run_call, run_main
from rewardd.code.extract import extract_program
from rewardd.code.limits import Limits
from rewardd.code.sandbox import Sandbox
from rewardd.code.slot import InfraError, Slot

Verdict = Literal["correct", "partial", "wrong", "unjudged", "rejected"]

_LOG: Final = logging.getLogger(__name__)
_MAX_TESTS: Final = 10_000
_NUM_TRIES: Final = 2
_MIN_TEST_S: Final = 0.05

Trial = Callable[[Slot, float], Status]


@dataclass(frozen=True, kw_only=True)
class CodeResult:
    """The verdict on one program.

    Attributes:
        passed: every test passed.
        pass_rate: tests passed over all tests, also those not run after an early exit.
        verdict: `correct`, `partial` (only with `reward="fraction"`), `wrong`, `unjudged` (the sandbox failed: never
            a score) or `rejected` (the test set is malformed).
        reason: "passed", or what the first failing test met: a status, or "no_code", "invalid_tests", "total_timeout".
        tier: the isolation the program ran under.
        tests: status of each test in order.
        detail: one line for people.
    """

    passed: bool
    pass_rate: float
    verdict: Verdict
    reason: str
    num_tests: int
    num_passed: int
    tier: str
    elapsed_ms: float
    tests: tuple[Status, ...] = ()
    detail: str = ""


@dataclass
class _Tally:
    """Statuses so far, and why the rest was not run."""

    statuses: list[Status] = field(default_factory=list)
    out_of_time: bool = False
    detail: str = ""


def _text(value: Any, what: str) -> str:
    if isinstance(value, list):
        return "\n".join(_text(line, what) for line in value)
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{what} is {type(value).__name__}, not text or a list of lines")


def _paired(tests: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("tests need the lists `inputs` and `outputs`")
    if len(inputs) != len(outputs):
        raise ValueError(f"tests have {len(inputs)} inputs but {len(outputs)} outputs")
    if not inputs:
        raise ValueError("there are no tests; an empty test set proves nothing")
    if len(inputs) > _MAX_TESTS:
        raise ValueError(f"there are {len(inputs)} tests; at most {_MAX_TESTS} are run")
    return inputs, outputs


def _stdin_trials(program: str, tests: Mapping[str, Any], limits: Limits) -> list[Trial]:
    rule = Comparison.from_tests(tests)
    inputs, outputs = _paired(tests)

    def trial(stdin: bytes, expected: str) -> Trial:
        def judge(slot: Slot, time_s: float) -> Status:
            run = run_main(slot, program=program, stdin=stdin, limits=limits, time_s=time_s)
            got = run.output.decode("utf-8", "surrogateescape")
            return run.failure or ("passed" if outputs_equal(got, expected, rule=rule) else "wrong_answer")

        return judge

    return [
        trial(_text(given, "an input").encode("utf-8", "surrogateescape"), _text(expected, "an output"))
        for given, expected in zip(inputs, outputs, strict=True)
    ]


def _arguments(given: Any) -> list[Any]:
    """One JSON value a line is one argument; a list is the arguments themselves."""
    if isinstance(given, list):
        return given
    if not isinstance(given, str):
        raise ValueError(f"a function's input is {type(given).__name__}, not JSON lines or a list")
    return [_json(line, "an argument") for line in given.split("\n") if line.strip()]


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{what} is not JSON: {text[:60]!r}") from None


def _function_trials(program: str, tests: Mapping[str, Any], limits: Limits) -> list[Trial]:
    rule = Comparison.from_tests(tests)
    inputs, outputs = _paired(tests)
    name = tests.get("fn_name")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"fn_name is {name!r}, not the name of a function")

    def trial(arguments: list[Any], accepted: list[Any]) -> Trial:
        def judge(slot: Slot, time_s: float) -> Status:
            run: Run = run_call(slot, program=program, function=name, arguments=arguments, limits=limits, time_s=time_s)
            if run.failure is not None:
                return run.failure
            met = any(values_equal(run.value, expected, rule=rule) for expected in accepted)
            return "passed" if met else "wrong_answer"

        return judge

    trials = []
    for given, expected in zip(inputs, outputs, strict=True):
        accepted = [_json(expected, "an output") if isinstance(expected, str) and isinstance(given, str) else expected]
        # Data sets that store values instead of text wrap the result in a list of one.
        if isinstance(given, list) and isinstance(expected, list) and len(expected) == 1:
            accepted.append(expected[0])
        trials.append(trial(_arguments(given), accepted))
    return trials


def _run_trials(slot: Slot, trials: list[Trial], *, limits: Limits, early_exit: bool) -> _Tally:
    tally = _Tally()
    deadline = time.monotonic() + limits.total_s
    for trial in trials:
        left = deadline - time.monotonic()
        if left < _MIN_TEST_S:
            tally.out_of_time = True
            break
        tally.statuses.append(trial(slot, min(limits.time_limit_s, left)))
        if early_exit and tally.statuses[-1] != "passed":
            break
    return tally


def run_case(
    sandbox: Sandbox,
    *,
    kind: Kind,
    response: str | None,
    program: str | None = None,
    tests: Mapping[str, Any],
    limits: Limits | None = None,
    early_exit: bool = False,
    reward: Literal["binary", "fraction"] = "binary",
) -> CodeResult:
    """Judges one program by all its tests; blocks until nothing of it is left.

    Args:
        kind: as `decode_tests` says.
        response: what the model said; the program is extracted from it unless given.
        tests: test set of the kind: `{inputs, outputs[, comparison]}`, the same with `fn_name`, or an assert shape.
        early_exit: stop at the first failing test (the pass rate still counts all tests).
        reward: `fraction` allows the verdict `partial`.

    Returns:
        The result; infrastructure faults come back as `unjudged` after one retry on a fresh fork server.
    """
    began = time.monotonic()
    limits = limits or Limits()
    if program is None:
        program = extract_program(response or "")

    def result(
        tally: _Tally, num_tests: int, *, reason: str | None = None, verdict: Verdict | None = None
    ) -> CodeResult:
        return _result(tally, num_tests, sandbox.tier, (time.monotonic() - began) * 1000, reward, reason, verdict)

    try:
        if kind == "assert":
            plan = asserts.plan(tests)
            num_tests = plan.num_units
        else:
            trials = (_stdin_trials if kind == "stdin" else _function_trials)(program or "", tests, limits)
            num_tests = len(trials)
    except ValueError as fault:
        return result(_Tally(detail=str(fault)), 0, reason="invalid_tests", verdict="rejected")
    if program is None:
        return result(_Tally(), num_tests, reason="no_code", verdict="wrong")
    for attempt in range(_NUM_TRIES):
        try:
            with sandbox.slot() as slot:
                if kind == "assert":
                    statuses, out_of_time = asserts.run(
                        slot, plan, program=program, limits=limits, early_exit=early_exit
                    )
                    tally = _Tally(statuses, out_of_time)
                else:
                    tally = _run_trials(slot, trials, limits=limits, early_exit=early_exit)
            return result(tally, num_tests)
        except asserts.TestsBroken as fault:
            return result(_Tally(detail=str(fault)), 0, reason="invalid_tests", verdict="rejected")
        except (InfraError, OSError) as fault:
            _LOG.warning("code sandbox fault: attempt=%d fault=%s", attempt + 1, fault)
            tally = _Tally(detail=str(fault))
    return result(tally, num_tests, reason="infra_error", verdict="unjudged")


def _result(
    tally: _Tally,
    num_tests: int,
    tier: str,
    elapsed_ms: float,
    reward: str,
    reason: str | None,
    verdict: Verdict | None,
) -> CodeResult:
    statuses: list[Status] = list(tally.statuses)
    statuses += ["not_run"] * (num_tests - len(statuses))
    num_passed = statuses.count("passed")
    passed = num_tests > 0 and num_passed == num_tests
    rate = num_passed / num_tests if num_tests else 0.0
    if verdict is None:
        if passed:
            verdict = "correct"
        else:
            verdict = "partial" if reward == "fraction" and num_passed else "wrong"
    if reason is None:
        failed = next((status for status in statuses if status not in ("passed", "not_run")), None)
        reason = "passed" if passed else failed or ("total_timeout" if tally.out_of_time else "not_run")
    return CodeResult(
        passed=passed,
        pass_rate=rate,
        verdict=verdict,
        reason=reason,
        num_tests=num_tests,
        num_passed=num_passed,
        tier=tier,
        elapsed_ms=elapsed_ms,
        tests=tuple(statuses),
        detail=tally.detail,
    )
