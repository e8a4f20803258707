import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewardd.code.compare import Comparison, outputs_equal, values_equal

RULE = Comparison()


@pytest.mark.parametrize(
    ("got", "expected", "equal"),
    [
        ("3", "3\n", True),
        ("3  \n\n\n", "3", True),
        ("  3", "3", True),
        ("1  2", "1 2", True),
        ("a  b", "a b", True),
        ("3.0", "3", True),
        ("3.0000001", "3", False),
        ("1000001", "1000000", False),
        ("0.3333333", "0.333333", True),
        ("0.3001", "0.3", False),
        ("inf", "1e308", False),
        ("nan", "nan", True),
        ("YES", "yes", False),
        ("1 2 2", "1 2", False),
        ("answer: 3", "3", False),
        ("", "", True),
        ("", "0", False),
        ("\n1", "1", False),
        ("1\n\n2", "1\n2", False),
        ("1\r\n2\r\n", "1\n2\n", True),
        ("1_0", "10", False),
        ("١", "1", False),
        ("1e400", "1e400", True),
        ("1e999999999", "1e999999998", False),
        ("-0", "0", True),
        ("+5", "5", True),
        ("0x10", "16", False),
        ("1" * 30000, "1" * 29999 + "2", False),
        (".5", "0.5", True),
        ("helloworld", "hello world", False),
        ("10000000000000000000000001", "10000000000000000000000000", False),
        ("100000.05", "100000.0", True),
    ],
)
def test_outputs(got: str, expected: str, equal: bool) -> None:
    assert outputs_equal(got, expected, rule=RULE) is equal


def test_yes_and_no_ignore_case_only_by_rule() -> None:
    lenient = Comparison.from_tests({"comparison": {"yes_no_ignores_case": True}})
    assert outputs_equal("Yes\nnO", "YES\nno", rule=lenient)
    assert not outputs_equal("maybe", "MAYBE", rule=lenient)
    assert not outputs_equal("no", "YES", rule=lenient)
    assert not outputs_equal("Yes", "YES", rule=RULE)


def test_tolerance_may_be_set_and_unknown_rules_are_refused() -> None:
    assert outputs_equal("1.01", "1.0", rule=Comparison.from_tests({"comparison": {"tolerance": 0.1}}))
    with pytest.raises(ValueError, match="tolerence"):
        Comparison.from_tests({"comparison": {"tolerence": 0.1}})


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    ("got", "expected", "equal"),
    [
        ((1, 2), [1, 2], True),
        ([(1,), [2]], [[1], [2]], True),
        ({1: "a"}, {"1": "a"}, True),
        ({1: 1, "1": 1}, {"1": 1}, False),
        ({True: 1}, {"True": 1}, False),
        (True, 1, False),
        (1, True, False),
        (None, None, True),
        (0, None, False),
        (3.0, 3, True),
        (float(2**60), 2**60 + 1, False),
        (0.1 + 0.2, 0.3, True),
        (1, 1.0, True),
        (10**400, 1.5, False),
        (math.inf, math.inf, True),
        (math.nan, math.nan, True),
        (math.inf, 1e308, False),
        ("1", 1, False),
        (Liar(7), 3, False),
        ([Liar(7)], [3], False),
        ({3}, [3], False),
        (b"a", "a", False),
        ("", [], False),
        ([], [], True),
        ({}, {}, True),
        ([1], [1, 2], False),
    ],
)
def test_values(got: object, expected: object, equal: bool) -> None:
    assert values_equal(got, expected, rule=RULE) is equal


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
)


@given(JSON)
def test_a_value_equals_itself_and_nothing_of_another_type(value: object) -> None:
    assert values_equal(value, value, rule=RULE)
    assert not values_equal([value, value], [value], rule=RULE)
    assert not values_equal(object(), value, rule=RULE)


@given(st.lists(st.lists(st.integers() | st.text(alphabet="abcXYZ", min_size=1, max_size=4), min_size=1, max_size=4)))
def test_output_spacing_never_matters(rows: list[list[object]]) -> None:
    tidy = "\n".join(" ".join(map(str, row)) for row in rows)
    untidy = "\n".join("  " + " \t".join(map(str, row)) + " " for row in rows) + "\n\n"
    assert outputs_equal(untidy, tidy, rule=RULE)
