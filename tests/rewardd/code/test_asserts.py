"""Honest programs under every shape of assert tests, and test sets that prove nothing."""

import pytest

from rewardd.code import CodeResult, Limits, Sandbox, run_case
from tests.rewardd.code.assert_suites import MALFORMED, PAIRS

LIMITS = Limits(time_limit_s=3.0, memory_mb=512, total_s=20.0)


def judge(
    sandbox: Sandbox,
    program: str,
    tests: dict,
    *,
    early_exit: bool = False,
    time_s: float = 3.0,
    fraction: bool = False,
) -> CodeResult:
    return run_case(
        sandbox,
        kind="assert",
        response=None,
        program=program,
        tests=tests,
        limits=LIMITS.with_time(time_s),
        early_exit=early_exit,
        reward="fraction" if fraction else "binary",
    )


@pytest.mark.parametrize(("good", "bad", "tests"), PAIRS.values(), ids=PAIRS.keys())
def test_good_program_passes_and_bad_one_fails(sandbox: Sandbox, good: str, bad: str, tests: dict) -> None:
    assert judge(sandbox, good, tests).verdict == "correct"
    assert judge(sandbox, bad, tests).verdict == "wrong"


@pytest.mark.parametrize("tests", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_tests_are_rejected(sandbox: Sandbox, tests: dict) -> None:
    result = judge(sandbox, "def add(a, b): return a + b", tests)
    assert (result.verdict, result.reason, result.passed) == ("rejected", "invalid_tests", False)


CHECK = {
    "entry_point": "f",
    "test_code": "def check(candidate):\n" + "".join(f"    assert candidate({n}) == {n}\n" for n in range(6)),
}


def test_every_assert_of_check_is_counted(sandbox: Sandbox) -> None:
    result = judge(sandbox, "def f(x): return x if x % 2 else -1", CHECK, fraction=True)
    assert result.tests == ("wrong_answer", "passed") * 3
    assert (result.verdict, result.pass_rate, result.num_tests) == ("partial", 0.5, 6)


def test_early_exit_counts_all_tests(sandbox: Sandbox) -> None:
    result = judge(sandbox, "def f(x): return x if x < 2 else 0", CHECK, early_exit=True, fraction=True)
    assert result.tests == ("passed", "passed", "wrong_answer", "not_run", "not_run", "not_run")
    assert result.pass_rate == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    ("act", "status"),
    [
        ("os._exit(0)", "runtime_error"),
        ("os.abort()", "runtime_error"),
        ("time.sleep(60)", "timeout"),
        ("sys.exit()", "runtime_error"),
    ],
)
def test_one_fatal_test_does_not_fail_the_others(sandbox: Sandbox, act: str, status: str) -> None:
    program = f"import os, sys, time\ndef f(x):\n    if x == 2: {act}\n    return x"
    result = judge(sandbox, program, CHECK, time_s=1.0)
    assert result.tests == ("passed", "passed", status, "passed", "passed", "passed")


def test_program_that_does_not_load_fails_every_test(sandbox: Sandbox) -> None:
    assert judge(sandbox, "1 / 0", CHECK).tests == ("runtime_error",) * 6
    assert judge(sandbox, "def f(:", CHECK).tests == ("compile_error",) * 6
    assert judge(sandbox, "while True: pass", CHECK, time_s=1.0).tests == ("timeout",) * 6


def test_total_time_ends_the_run(sandbox: Sandbox) -> None:
    limits = Limits(time_limit_s=1.0, total_s=1.5, memory_mb=256)
    result = run_case(
        sandbox,
        kind="assert",
        response=None,
        program="import time\ndef f(x): time.sleep(0.6); return x",
        tests=CHECK,
        limits=limits,
    )
    assert result.verdict == "wrong"
    assert result.num_passed == 2
