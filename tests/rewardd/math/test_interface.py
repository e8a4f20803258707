"""Modes, faults, reference decoding, import cost and the or1-compat profile."""

import subprocess
import sys

import numpy as np
import pytest

from rewardd.math import (
    MathResult,
    VerifierFault,
    check_gold,
    decode_ground_truth,
    exact_verdict,
    verify,
    warm_up,
)
from rewardd.math import verdict as verdict_module


def test_result_names_the_answer_and_the_path() -> None:
    assert verify(r"so \boxed{42}", gold="42") == MathResult(True, "equal_string", "42", "exact")
    assert verify(r"so \boxed{\frac{84}{2}}", gold="42").path == "exact"
    assert verify(r"so \boxed{2\ln 2}", gold=r"\ln 4").path == "symbolic"
    assert verify("I do not know", gold="42") == MathResult(False, "no_answer", None, "none")


@pytest.mark.parametrize(
    ("response", "gold", "reason"),
    [
        ("<think>it is 4", "4", "unfinished_reasoning"),
        (r"\boxed{3 \text{ or } 4}", "3", "hedge"),
        (r"\boxed{9^{9^{9^9}}}", "3", "too_complex"),
        (r"\boxed{12\text{ kg}}", r"12\text{ cm}", "unit_conflict"),
        (r"\boxed{\frac{1}{0}}", "3", "undefined"),
        (r"\boxed{5}", "3", "different"),
        (r"\boxed{12", "12", "unfinished_box"),
    ],
)
def test_reasons(response: str, gold: str, reason: str) -> None:
    result = verify(response, gold=gold)
    assert not result.correct and result.reason == reason


def test_any_reference_counts() -> None:
    assert verify(r"\boxed{4}", gold=["3", "4"]).correct
    assert not verify(r"\boxed{3 \text{ or } 4}", gold=["3", "4"]).correct
    assert verify(r"\boxed{2\ln 2}", gold=["3", r"\ln 4"]).correct


def test_box_can_be_required() -> None:
    assert verify("The answer is 42.", gold="42").correct
    assert verify("The answer is 42.", gold="42", require_box=True).reason == "no_box"
    assert verify("The answer is 42.", gold="42", final_answer="boxed").reason == "no_box"
    assert verify(r"\boxed{41} #### 42", gold="41", require_box=True).correct


def test_hash_convention_reads_only_the_mark() -> None:
    assert verify("\\boxed{41}\n#### 42", gold="42", final_answer="hash").correct
    assert not verify("The answer is 42.", gold="42", final_answer="hash").correct


def test_wrong_arguments_are_the_callers_error() -> None:
    with pytest.raises(ValueError, match="profile"):
        verify("x", gold="1", profile="lenient")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="final_answer"):
        verify("x", gold="1", final_answer="last")  # type: ignore[arg-type]
    for empty in ("", [], ["1", " "]):
        with pytest.raises(ValueError, match="gold"):
            verify("x", gold=empty)


def test_b21_internal_failure_is_a_fault_not_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(verdict_module, "extract", broken)
    with pytest.raises(VerifierFault, match="MemoryError"):
        verify(r"\boxed{42}", gold="42")
    with pytest.raises(VerifierFault):
        exact_verdict(r"\boxed{42}", gold="42")


def test_b21_verdicts_off_the_main_thread_are_the_same() -> None:
    from concurrent.futures import ThreadPoolExecutor

    pairs = [(r"\boxed{2\ln 2}", r"\ln 4"), (r"\boxed{1+\overline{z}}", r"\overline{z}+1"), (r"\boxed{3}", "4")]
    with ThreadPoolExecutor(1) as pool:
        for profile in ("strict", "or1-compat"):
            for response, gold in pairs:
                there = pool.submit(verify, response, gold=gold, profile=profile).result(60)
                assert there == verify(response, gold=gold, profile=profile)


def test_import_and_exact_stage_load_no_symbolic_library() -> None:
    program = (
        "import sys, rewardd.math as m\n"
        "assert m.exact_verdict(r'\\boxed{\\frac{6}{8}}', gold='0.75').correct\n"
        "assert m.exact_verdict(r'\\boxed{2\\ln 2}', gold=r'\\ln 4') is None\n"
        "assert not {'sympy', 'mpmath', 'math_verify'} & set(sys.modules)\n"
        "m.warm_up()\n"
        "assert {'sympy', 'mpmath', 'math_verify'} <= set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_warm_up_can_be_repeated() -> None:
    warm_up()
    warm_up()
    assert verify(r"\boxed{\sin^2 x+\cos^2 x}", gold="1").correct


@pytest.mark.parametrize(
    ("value", "golds"),
    [
        ('["3", "4"]', ["3", "4"]),
        ("204", ["204"]),
        ("025", ["025"]),
        (r"336^\circ", [r"336^\circ"]),
        ('["3", null]', ["3"]),
        (["3", None, "4"], ["3", "4"]),
        (np.array(["3", "4"], dtype=object), ["3", "4"]),
        (np.array(["3"]), ["3"]),
        ('["\\\\frac{1}{2}"]', [r"\frac{1}{2}"]),
        ("[1, 2)", ["[1, 2)"]),
        ("[1, 2]", ["[1, 2]"]),
        (7, ["7"]),
        ('"7"', ['"7"']),
        ("true", ["true"]),
    ],
)
def test_ground_truth_is_decoded_only_when_it_is_a_list_of_texts(value: object, golds: list[str]) -> None:
    assert decode_ground_truth(value) == golds


@pytest.mark.parametrize(
    "value", ['{"inputs": ["1"], "outputs": ["2"]}', {"inputs": None}, [], "[]", None, [None], [["1"]], True]
)
def test_ground_truth_of_other_kinds_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        decode_ground_truth(value)


def test_check_gold_names_the_problem() -> None:
    assert check_gold("42") is None
    assert check_gold([r"\frac{1}{2}", r"\text{no solution}", "(1,2)"]) is None
    for empty in ("", "  ", "$$", [], r"\boxed{}"):
        assert check_gold(empty) == "empty"
    assert check_gold(r"\frac{1}{") == "unparsed"
    assert check_gold("7" * 5000) == "too_complex"


@pytest.mark.parametrize(
    ("response", "gold", "expected"),
    [
        (r"\boxed{25}", "025", True),
        (r"\boxed{336}", r"336^\circ", True),
        (r"\boxed{26}. wait, \boxed{25}", "25", False),
        ("the total is 25", "25", True),
        (r"\boxed{0.3333}", r"\frac{1}{3}", False),
        (r"a</think>\boxed{24}</think>\boxed{25}", "25", False),
        (r"<think>\boxed{24}</think>\boxed{25}", "25", True),
        ("no number here", "25", False),
        (r"\boxed{9^{9^{9^9}}}", "25", False),
        ("hence $9^{9^{9^9}}$", "25", False),
    ],
)
def test_or1_compat_repeats_the_original_grader(response: str, gold: str, expected: bool) -> None:
    assert verify(response, gold=gold, profile="or1-compat").correct is expected
