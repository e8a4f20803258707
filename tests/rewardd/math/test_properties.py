"""Properties of the verdict on generated numbers and arbitrary text."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from rewardd.math import MathResult, check_gold, exact_verdict, verify

INTEGERS = st.integers(-(10**18), 10**18)
RATIONALS = st.fractions(max_denominator=10**6)
MATH_TEXT = st.text(st.sampled_from(list("0123456789abxyeinf+-*/^_=<>!|(){}[].,;:%$\\ \n'°½π≤")), max_size=60)


def box(text: str) -> str:
    return f"The answer is $\\boxed{{{text}}}$."


def spellings(value: int) -> list[str]:
    return [
        str(value),
        f"{value}.0",
        f"{value:,}".replace(",", "{,}"),
        f"{value:,}",
        f"\\frac{{{3 * value}}}{{3}}",
        f"\\text{{{value}}}",
        f"x = {value}",
        f"{value * 100}\\%",
        f"{value}\\text{{ cm}}",
        str(value).replace("-", "−"),
    ]


@given(INTEGERS, st.data())
def test_spellings_of_an_integer_are_equal(value: int, data: st.DataObject) -> None:
    response, gold = data.draw(st.sampled_from(spellings(value))), data.draw(st.sampled_from(spellings(value)))
    result = exact_verdict(box(response), gold=gold)
    assert result is not None and result.correct, (response, gold, result)


@given(INTEGERS, INTEGERS, st.data())
def test_different_integers_are_never_equal(value: int, other: int, data: st.DataObject) -> None:
    if value == other:
        other += 1
    response, gold = data.draw(st.sampled_from(spellings(value))), data.draw(st.sampled_from(spellings(other)))
    result = exact_verdict(box(response), gold=gold)
    assert result is not None and not result.correct, (response, gold, result)


def fraction_spellings(value: Fraction, k: int) -> list[str]:
    n, d = value.numerator, value.denominator
    sign = "-" if n < 0 else ""
    whole, rest = divmod(abs(n), d)
    mixed = f"{sign}{whole}\\frac{{{rest}}}{{{d}}}" if whole and rest else f"{n}/{d}"
    return [f"\\frac{{{n}}}{{{d}}}", f"{n * k}/{d * k}", f"{sign}\\dfrac{{{abs(n)}}}{{{d}}}", mixed, f"{n} \\div {d}"]


@given(RATIONALS, st.integers(1, 1000), st.data())
def test_spellings_of_a_fraction_are_equal(value: Fraction, k: int, data: st.DataObject) -> None:
    options = fraction_spellings(value, k)
    response, gold = data.draw(st.sampled_from(options)), data.draw(st.sampled_from(options))
    result = exact_verdict(box(response), gold=gold)
    assert result is not None and result.correct, (response, gold, result)


@given(RATIONALS, RATIONALS, st.integers(1, 1000), st.data())
def test_different_fractions_are_never_equal(value: Fraction, other: Fraction, k: int, data: st.DataObject) -> None:
    if value == other:
        other += Fraction(1, 10**9)
    response = data.draw(st.sampled_from(fraction_spellings(value, k)))
    gold = data.draw(st.sampled_from(fraction_spellings(other, k)))
    result = exact_verdict(box(response), gold=gold)
    assert result is not None and not result.correct, (response, gold, result)


@given(st.integers(-(10**9), 10**9), st.integers(1, 12))
def test_decimals_equal_their_fraction_and_not_their_rounding(digits: int, places: int) -> None:
    value = Fraction(digits, 10**places)
    text = f"{'-' if digits < 0 else ''}{abs(digits) // 10**places}.{abs(digits) % 10**places:0{places}d}"
    gold = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    assert verify(box(text), gold=gold).correct
    assert verify(box(text + "00"), gold=gold).correct
    assert not verify(box(text + "01"), gold=gold).correct
    assert value == 0 or not verify(box(text), gold=gold + "\\%").correct


@given(MATH_TEXT | st.text(max_size=200), MATH_TEXT.filter(str.strip))
@settings(max_examples=300, deadline=None)
def test_any_text_gets_a_verdict(response: str, gold: str) -> None:
    for text in (response, box(response), f"The answer is {response}"):
        assert isinstance(verify(text, gold=gold), MathResult)
    check_gold(gold)


@given(MATH_TEXT, MATH_TEXT)
@settings(max_examples=300, deadline=None)
def test_exact_equality_is_symmetric(left: str, right: str) -> None:
    if not left.strip() or not right.strip():
        return
    one, two = exact_verdict(box(left), gold=right), exact_verdict(box(right), gold=left)
    if one is not None and two is not None and "}" not in left + right and "\\" not in left[-1] + right[-1]:
        assert one.correct == two.correct or "{" in left + right, (left, right, one, two)


@given(RATIONALS, RATIONALS)
def test_exact_equality_of_numbers_is_symmetric(left: Fraction, right: Fraction) -> None:
    one, two = exact_verdict(box(str(left)), gold=str(right)), exact_verdict(box(str(right)), gold=str(left))
    assert one is not None and two is not None and one.correct == two.correct == (left == right)
