import base64
import json
import os
import pickle
import zlib
from pathlib import Path

import pytest

from rewardd.code import decode_tests, extract_program
from rewardd.code.decode import unpickle_data

TACO = {"inputs": ["1\n"], "outputs": ["2\n"]}


def test_taco_as_json_text_with_null_keys() -> None:
    row = json.dumps({**TACO, "fn_name": None, "import_prefix": None, "test_code": None, "entry_point": None})
    assert decode_tests(row) == ("stdin", TACO)


def test_fn_name_makes_it_a_function() -> None:
    assert decode_tests({**TACO, "fn_name": "f"}) == ("function", {**TACO, "fn_name": "f"})


def test_leetcode() -> None:
    truth = {
        "import_prefix": "import math",
        "test_code": "def check(candidate):\n    assert candidate(1) == 1",
        "entry_point": "Solution().f",
        "inputs": None,
    }
    kind, tests = decode_tests(json.dumps(truth))
    assert kind == "assert"
    assert set(tests) == {"import_prefix", "test_code", "entry_point"}


def test_text_inside_an_input_does_not_misroute() -> None:
    assert decode_tests({"inputs": ['"question_id" "import_prefix" assert_case'], "outputs": ["x"]})[0] == "stdin"


def test_asserts_also_as_a_bare_list() -> None:
    assert decode_tests({"assert_case": ["assert f() == 1"]})[0] == "assert"
    assert decode_tests('["assert f() == 1", "assert f() == 1"]') == (
        "assert",
        {"assert_case": ["assert f() == 1", "assert f() == 1"]},
    )


@pytest.mark.parametrize("truth", ["not json", "204", "{}", [], None, 3, {"answer": "x"}, '"text"'])
def test_other_shapes_are_refused(truth: object) -> None:
    with pytest.raises(ValueError):
        decode_tests(truth)


CASES = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]


def packed(payload: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(payload))).decode()


def test_livecodebench_private_tests_are_unpacked() -> None:
    truth = {
        "question_id": "q",
        "public_test_cases": json.dumps(CASES),
        "private_test_cases": packed(json.dumps(CASES)),
        "metadata": json.dumps({}),
    }
    assert decode_tests(truth) == ("stdin", {"inputs": ["1\n"] * 2, "outputs": ["2\n"] * 2})
    truth["metadata"] = json.dumps({"func_name": "f"})
    assert decode_tests(truth)[0] == "function"


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_pickles_run_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(ValueError, match="system"):
        unpickle_data(pickle.dumps(Exploit(mark)))
    with pytest.raises(ValueError, match="system"):
        decode_tests({"public_test_cases": [], "private_test_cases": packed(Exploit(mark))})
    assert not mark.exists()


@pytest.mark.parametrize(
    "blob", [b"", b"\x80", b"cos\nsystem\n.", pickle.dumps([1, 2])[:-3], b"\x80\x04\x95" + b"\xff" * 20]
)
def test_damaged_pickles_are_one_error(blob: bytes) -> None:
    with pytest.raises(ValueError):
        unpickle_data(blob)


FENCE = "```"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        (f"{FENCE}python\nprint(1)\n{FENCE}", "print(1)\n"),
        (f"{FENCE}PY\nprint(1)\n{FENCE}\n{FENCE}\n1\n{FENCE}", "print(1)\n"),
        (f"{FENCE}\nprint(1)\n{FENCE}", "print(1)\n"),
        (f"{FENCE}python3 title=x\nprint(1)\n{FENCE}", "print(1)\n"),
        (f"{FENCE}python\nprint(1)\n{FENCE}\nor\n{FENCE}python\nprint(2)\n{FENCE}", "print(2)\n"),
        (f"1. so:\n   {FENCE}python\n   if x:\n       y\n   {FENCE}", "if x:\n    y\n"),
        (f"{FENCE}{FENCE}python\na = '''\n{FENCE}\n'''\n{FENCE}{FENCE}", "a = '''\n" + FENCE + "\n'''\n"),
        ("~~~python\nprint(1)\n~~~", "print(1)\n"),
        (f"{FENCE}python\nprint(1){FENCE}", "print(1)\n"),
        (f"<think>{FENCE}python\n1\n{FENCE}</think>{FENCE}python\nprint(1)\n{FENCE}", "print(1)\n"),
        (f"<think>{FENCE}python\n1\n{FENCE}</think>none", None),
        (f"<think>\n{FENCE}python\n1\n{FENCE}", None),
        (f"{FENCE}python\nprint(1)\n", None),
        (f"{FENCE}cpp\nint main(){{}}\n{FENCE}", None),
        (f"{FENCE}python\n\n{FENCE}", None),
        ("print(1)", None),
        ("", None),
    ],
)
def test_extraction(response: str, program: str | None) -> None:
    assert extract_program(response) == program
