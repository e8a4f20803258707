"""Figures of the status that are kept over time."""

import sys

import pytest

from learner.coordinator.status import WINDOW_S, Rates


def test_rates_are_of_the_last_minute_and_hold_no_more_than_that() -> None:
    rates = Rates()
    for number in range(20_000):
        rates.answered(100, now=1000.0 + number / 100)
    assert rates.tokens_per_s(now=1200.0) == pytest.approx(10_000, rel=0.02)
    held = sum(sys.getsizeof(value) for value in vars(rates).values() if value is not None)
    assert held < 10_000, "a figure per answer would be kept for as long as nobody asks for the status"
    assert rates.tokens_per_s(now=1200.0 + 2 * WINDOW_S) == 0.0
