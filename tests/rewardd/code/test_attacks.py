"""Programs that try for a pass without solving the task, and the honest ones that must not be mistaken for them."""

import time

import pytest

from rewardd.code import CodeResult, Limits, Sandbox, run_case
from rewardd.code.decode import Kind
from tests.rewardd.code.attack_programs import ADD_ATTACKS, EVERYTHING_EQUAL, LIMITED, REFUSED_CALLS, STDIN_ATTACKS

LIMITS = Limits(time_limit_s=3.0, memory_mb=512, total_s=30.0)
ADD_ASSERTS = {"assert_case": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(5, 5) == 10"]}
ADD_CHECK = {
    "test_code": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n",
    "entry_point": "add",
    "import_prefix": "import math\n",
}
ADD_PYTEST = {
    "test_code": "from solution import add\n\ndef test_a():\n    assert add(1, 2) == 3\n\n"
    "def test_b():\n    assert add(-1, 1) == 0\n"
}
ADD_FUNCTION = {"fn_name": "add", "inputs": ["1\n2", "10\n-4"], "outputs": ["3", "6"]}


def judge(sandbox: Sandbox, program: str, tests: dict, *, kind: Kind = "assert", limits: Limits = LIMITS) -> CodeResult:
    return run_case(sandbox, kind=kind, response=None, program=program, tests=tests, limits=limits)


@pytest.mark.parametrize("tests", [ADD_ASSERTS, ADD_CHECK, ADD_PYTEST], ids=["cases", "check", "pytest"])
@pytest.mark.parametrize("program", ADD_ATTACKS.values(), ids=ADD_ATTACKS.keys())
def test_b26_attack_on_asserts_fails(sandbox: Sandbox, program: str, tests: dict) -> None:
    result = judge(sandbox, program, tests)
    assert not result.passed
    assert result.verdict == "wrong"
    assert result.num_passed == 0


@pytest.mark.parametrize("program", ADD_ATTACKS.values(), ids=ADD_ATTACKS.keys())
def test_b26_attack_on_function_tests_fails(sandbox: Sandbox, program: str) -> None:
    result = judge(sandbox, program, ADD_FUNCTION, kind="function")
    assert result.verdict == "wrong"
    assert result.reason in ("wrong_answer", "runtime_error")


@pytest.mark.parametrize("tests", [ADD_ASSERTS, ADD_CHECK, ADD_PYTEST], ids=["cases", "check", "pytest"])
def test_honest_program_passes_asserts(sandbox: Sandbox, tests: dict) -> None:
    result = judge(sandbox, "def add(a, b):\n    return a + b", tests)
    assert result.verdict == "correct"
    assert set(result.tests) == {"passed"}


TOLERANT = {
    "difference": "assert abs(f(1) - 0.3) < 1e-6",
    "isclose": "import math\nassert math.isclose(f(1), 0.3)",
    "round": "assert round(f(1), 3) == 0.3",
    "membership": "assert f(1) in (0.3, 0.4)",
    "reverse membership": "assert 0.3 in f(1)",
    "float": "assert float(f(1)) == 0.3",
    "ordering": "assert 0.2 < f(1) < 0.4",
    "approx": "import pytest\nassert f(1) == pytest.approx(0.3)",
    "reversed": "assert 0.3 == f(1)",
    "inside a list": "assert [f(1)] == [0.3]",
    "as a key": "assert {f(1): 1} == {0.3: 1}",
    "map": "assert all(map(lambda x: x == 0.3, [f(1), f(2)]))",
    "sum": "assert sum([f(1)]) == 0.3",
}


@pytest.mark.parametrize("test", TOLERANT.values(), ids=TOLERANT.keys())
def test_object_equal_to_everything_meets_no_assertion(sandbox: Sandbox, test: str) -> None:
    program = EVERYTHING_EQUAL.format(base="object").replace("def add(a, b)", "def f(x)")
    assert judge(sandbox, program, {"assert_case": [test]}).verdict == "wrong"
    if "in f(1)" not in test:
        assert judge(sandbox, "def f(x): return 0.3", {"assert_case": [test]}).verdict == "correct"


@pytest.mark.parametrize("name", ["sum", "gcd", "merge", "add"])
def test_tested_name_is_the_programs_whatever_else_bears_it(sandbox: Sandbox, name: str) -> None:
    tests = {"assert_case": [f"assert {name}(12, 8) == 4"]}
    assert judge(sandbox, f"def {name}(a, b): return 4", tests).passed
    assert not judge(sandbox, "def other(a, b): return 4", tests).passed


def test_program_cannot_bring_its_own_judge(sandbox: Sandbox) -> None:
    tests = {"assert_case": ["assert Counter(f(2)) == Counter([1, 2])", "assert sorted(f(2)) == [1, 2]"]}
    program = (
        "class Counter:\n    def __init__(self, x): pass\n    def __eq__(self, o): return True\n"
        "def sorted(x): return [1, 2]\ndef f(x): return []"
    )
    assert not judge(sandbox, program, tests).passed
    assert judge(sandbox, "def f(x): return [2, 1]", tests).passed


def test_tests_do_not_linger_in_an_ancestor_of_the_program(sandbox: Sandbox) -> None:
    """The first session ends by the program's doing; the program of the second searches all its memory."""
    program = """
import os, re
def f(x):
    if x == 1: os._exit(0)
    found = []
    mem = open('/proc/self/mem', 'rb')
    for line in open('/proc/self/maps'):
        a, b = [int(v, 16) for v in line.split()[0].split('-')]
        if 'rw' in line and b - a < 1 << 28:
            try:
                mem.seek(a); data = mem.read(b - a)
            except (OSError, ValueError): continue
            found += [match.decode() for match in re.findall(rb'C[A]NARY-97-[0-9]{3}', data)]
    return found[0] if found else 'nothing'
"""
    tests = {"assert_case": ["assert f(1) == 1", "assert f(2) == 'CANARY-97-412'", "assert f(3) == 'nothing'"]}
    result = judge(sandbox, program, tests)
    assert result.tests == ("runtime_error", "wrong_answer", "passed")


@pytest.mark.parametrize("program", STDIN_ATTACKS.values(), ids=STDIN_ATTACKS.keys())
def test_expected_output_is_nowhere_to_be_found(sandbox: Sandbox, program: str) -> None:
    for _ in range(2):
        result = judge(sandbox, program, {"inputs": [""], "outputs": ["SECRET-314159\n"]}, kind="stdin")
        assert result.verdict == "wrong"


@pytest.mark.parametrize("program", REFUSED_CALLS.values(), ids=REFUSED_CALLS.keys())
def test_b28_system_call_is_refused(sandbox: Sandbox, program: str) -> None:
    assert judge(sandbox, program, {"inputs": [""], "outputs": ["-1\n"]}, kind="stdin").passed


def test_nothing_is_carried_from_test_to_test(sandbox: Sandbox) -> None:
    program = """
import os, glob
folders = ('/tmp', '/dev/shm', '/var/tmp', '.')
seen = [path for folder in folders for path in glob.glob(folder + '/mark*')]
for folder in folders:
    try: open(folder + '/mark', 'w').write('x')
    except OSError: pass
if os.fork() == 0:
    os.setsid()
    while True: pass
print(len(seen), len([p for p in os.listdir('/proc') if p.isdigit()]))
"""
    tests = {"inputs": [""] * 4, "outputs": ["0 3\n"] * 4}
    assert judge(sandbox, program, tests, kind="stdin").tests == ("passed",) * 4


def test_b28_software_is_read_only_and_nothing_else_is_visible(sandbox: Sandbox) -> None:
    program = """
import os, sys
wrong = []
for path in ('/usr/x', '/etc/x', '/x', os.path.join(sys.prefix, 'x'), '/dev/x', '/proc/x'):
    try:
        open(path, 'w'); wrong.append(path)
    except OSError: pass
for path in ('/root', '/home', '/work', '/var', '/sys', '/etc/shadow', '/proc/1/root', '/proc/1/cwd'):
    try:
        os.listdir(path); wrong.append(path)
    except OSError: pass
print(wrong)
"""
    assert judge(sandbox, program, {"inputs": [""], "outputs": ["[]\n"]}, kind="stdin").passed


@pytest.mark.parametrize(("program", "reasons"), LIMITED.values(), ids=LIMITED.keys())
def test_limits_hold(sandbox: Sandbox, program: str, reasons: set[str]) -> None:
    limits = Limits(time_limit_s=2.0, memory_mb=256)
    began = time.monotonic()
    result = judge(sandbox, program, {"inputs": [""], "outputs": ["stopped\n"]}, kind="stdin", limits=limits)
    assert result.reason in reasons
    assert time.monotonic() - began < 8.0
