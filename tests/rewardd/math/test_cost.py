"""What one comparison may cost, whatever the formula."""

import math
import time

import pytest

from protocol.config.services import MathSection
from rewardd.math import verify


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("7", r"\sum_{k=1}^{2000} \sin(k)^{k}"),
        ("7", r"\sum_{k=1}^{2000}\sqrt[k]{k!}"),
        ("7", r"\sum_{k=1}^{300} (k/100+0.25)!"),
        ("7", r"\frac{1}{1999!}+(2.5)!"),
        ("x^{0.5}", r"x^{0.5}" + "+".join(rf"x^{{{k}.5}}" for k in range(1, 200))),
        ("7", "+".join(rf"({k}!)^{{0.5}}" for k in range(100, 140))),
        ("7", r"\ln(1999!)" * 40),
    ],
)
def test_no_formula_costs_more_than_half_the_deadline(gold: str, answer: str) -> None:
    began = time.process_time()
    assert not verify(f"\\boxed{{{answer}}}", gold=gold).correct
    assert time.process_time() - began < MathSection().deadline_s / 2


def test_values_of_the_gamma_function_are_known() -> None:
    assert verify(r"\boxed{\frac{\sqrt{\pi}}{2}}", gold="(1/2)!").correct
    assert verify(r"\boxed{\sum_{k=1}^{50} k!}", gold=str(sum(math.factorial(k) for k in range(1, 51)))).correct
