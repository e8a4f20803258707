"""Figures of `bench overlap` on planted phases."""

import pytest

from tests.benchmarks.bench_overlap import WARM_UP, Phase, Sample, crossing, overlap_fraction
from tests.learner.coordinator.harness import make_config


def phase(tmp_path, *, busy_from: float, busy_to: float, foreign: float = 0.0) -> Phase:
    """Updates of 10 s, of which 8 s are steps; a generator samples from `busy_from` to `busy_to` s of each."""
    records = [
        {"batch_id": batch, "attempt": 1, "time": 10.0 * batch, "perf/update_seconds": 8.0}
        for batch in range(1, WARM_UP + 6)
    ]
    samples = [Sample(time=0.0, num_tokens=0.0, num_leased=0.0, num_answered=0.0, machine_s=0.0, roles_s=0.0)]
    for tick in range(1, 10 * int(records[-1]["time"])):
        time = tick / 10.0
        busy = busy_from <= time % 10.0 < busy_to
        samples.append(
            Sample(
                time=time,
                num_tokens=samples[-1].num_tokens + busy,
                num_leased=float(busy),
                num_answered=float(tick),
                machine_s=time * (1.5 + foreign),
                roles_s=time * 1.5,
            )
        )
    return Phase(make_config(tmp_path), records=records, samples=samples)


def test_sampling_within_steps_counts_and_sampling_between_them_does_not(tmp_path):
    within = overlap_fraction(phase(tmp_path, busy_from=4.0, busy_to=8.0))
    between = overlap_fraction(phase(tmp_path, busy_from=0.0, busy_to=2.0))
    assert within == pytest.approx((0.5, 0.6, 0.2), abs=0.03)
    assert between == pytest.approx((0.0, 0.8, 0.2), abs=0.03)


def test_disturbed_updates_are_told_apart(tmp_path):
    calm = phase(tmp_path, busy_from=0.0, busy_to=5.0)
    disturbed = phase(tmp_path, busy_from=0.0, busy_to=5.0, foreign=0.5)
    assert calm.periods(calm=True) == calm.periods(calm=False) == dict.fromkeys(range(WARM_UP + 1, WARM_UP + 6), 10.0)
    assert disturbed.periods(calm=True) == {}
    assert disturbed.steady_load() == pytest.approx(0.5, rel=0.05)


def test_time_of_an_answer_is_interpolated(tmp_path):
    assert crossing(phase(tmp_path, busy_from=0.0, busy_to=1.0).samples, at=12.5) == pytest.approx(1.25)
