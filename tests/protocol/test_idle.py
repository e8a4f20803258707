"""Every second is booked to exactly one cause."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.idle import IdleClock


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    st.lists(st.tuples(st.sampled_from(["working", "a", "b"]), st.floats(0.5, 50.0)), max_size=30), st.floats(1, 200)
)
def test_fractions_sum_to_one_over_any_window(spans, window):
    time = Time()
    clock = IdleClock(now=time)
    booked: dict[str, float] = {}
    for cause, seconds in spans:
        clock.switch(cause)
        time.now += seconds
        booked[cause] = booked.get(cause, 0.0) + seconds
    assert sum(clock.fractions(window).values()) == pytest.approx(1.0)
    assert {cause: s for cause, s in clock.totals().items() if s > 0.0} == pytest.approx(booked)


def test_causes_nest_and_come_back():
    time = Time()
    clock = IdleClock(now=time)
    with clock.cause("outer"):
        time.now += 2.0
        with clock.cause("inner"):
            time.now += 1.0
        time.now += 1.0
    time.now += 4.0
    assert clock.fractions(8.0) == pytest.approx({"outer": 3 / 8, "inner": 1 / 8, "working": 0.5})
    assert clock.fractions(4.0) == {"working": 1.0}


def test_a_cause_ends_with_its_block_even_on_errors():
    clock = IdleClock()
    with pytest.raises(KeyError), clock.cause("waiting"):
        raise KeyError
    assert clock.current == "working"


def test_switching_a_thousand_times_a_second_is_booked_and_kept_small():
    time = Time()
    clock = IdleClock(now=time, keep_s=100.0)
    tracemalloc.start()
    try:
        for _ in range(100_000):
            with clock.cause("waiting"):
                time.now += 0.003
            time.now += 0.001
        assert tracemalloc.get_traced_memory()[0] < 300_000
    finally:
        tracemalloc.stop()
    assert clock.fractions(60.0) == pytest.approx({"waiting": 0.75, "working": 0.25}, rel=1e-3)
    assert clock.totals() == pytest.approx({"waiting": 300.0, "working": 100.0})
