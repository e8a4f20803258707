import json

import numpy as np
import pytest

from learner.algorithms.alarms import AlarmConfig, AlarmEvent, CollapseAlarms

NORMAL = {
    "actor/entropy": 0.4,
    "actor/kl_behaviour": 0.01,
    "actor/kl_ref": 0.05,
    "response_length/mean": 800.0,
    "critic/score/mean": 0.5,
    "importance/ess": 0.95,
    "importance/capped_share": 0.01,
    "importance/capped_share/le_512": 0.01,
}
NUM_NORMAL = 60


def normal(rng: np.random.Generator) -> dict[str, float]:
    return {name: value * (1 + 0.05 * rng.standard_normal()) for name, value in NORMAL.items()}


def after_normal_updates() -> tuple[CollapseAlarms, np.random.Generator]:
    alarms, rng = CollapseAlarms(), np.random.default_rng(0)
    for update in range(NUM_NORMAL):
        assert alarms.observe(update=update, metrics=normal(rng)) == []
    return alarms, rng


def drive(alarms: CollapseAlarms, rng: np.random.Generator, *, changed: dict[str, float], num: int) -> list[AlarmEvent]:
    events = []
    for update in range(NUM_NORMAL, NUM_NORMAL + num):
        events += alarms.observe(update=update, metrics=normal(rng) | changed)
    return events


@pytest.mark.parametrize(
    ("metric", "value", "rules"),
    [
        ("actor/entropy", 0.005, {"limit", "drift"}),
        ("actor/entropy", 2.0, {"drift"}),
        ("actor/kl_behaviour", 3.0, {"limit", "drift"}),
        ("actor/kl_ref", 1.0, {"drift"}),
        ("response_length/mean", 100.0, {"drift"}),
        ("response_length/mean", 4000.0, {"drift"}),
        ("critic/score/mean", 0.2, {"drift"}),
        ("importance/ess", 0.05, {"limit", "drift"}),
        ("importance/capped_share", 0.7, {"limit"}),
        ("importance/capped_share/le_512", 0.7, {"limit"}),
    ],
)
def test_b71_a_collapse_alarms_within_ten_updates_and_once(metric: str, value: float, rules: set[str]) -> None:
    alarms, rng = after_normal_updates()
    events = drive(alarms, rng, changed={metric: value}, num=10)
    assert {event.rule for event in events} == rules
    assert len(events) == len(rules)
    assert {event.metric for event in events} == {metric}
    assert {event.update for event in events} == {NUM_NORMAL + 4}
    assert all(metric in event.message for event in events)
    assert alarms.active == {f"{rule}:{metric}" for rule in rules}
    assert alarms.last_good_update == NUM_NORMAL - 1


def test_b71_a_slow_slide_alarms_too() -> None:
    alarms, rng = after_normal_updates()
    events = []
    for update in range(NUM_NORMAL, NUM_NORMAL + 40):
        slid = 0.4 * 0.9 ** (update - NUM_NORMAL)
        events += alarms.observe(update=update, metrics=normal(rng) | {"actor/entropy": slid})
    assert events and events[0].rule == "drift" and events[0].update < NUM_NORMAL + 20


@pytest.mark.parametrize(
    ("metric", "value"), [("critic/score/mean", 0.9), ("importance/ess", 1.0), ("actor/kl_ref", 0.0)]
)
def test_changes_for_the_better_do_not_alarm(metric: str, value: float) -> None:
    alarms, rng = after_normal_updates()
    assert drive(alarms, rng, changed={metric: value}, num=30) == []


def test_a_single_outlier_does_not_alarm() -> None:
    alarms, rng = after_normal_updates()
    assert drive(alarms, rng, changed={"actor/entropy": 0.0}, num=4) == []
    assert alarms.observe(update=99, metrics=normal(rng)) == []
    assert alarms.last_good_update == 99


def test_noise_alone_does_not_alarm() -> None:
    alarms, rng = CollapseAlarms(), np.random.default_rng(1)
    for update in range(1000):
        assert alarms.observe(update=update, metrics=normal(rng)) == []


def test_an_alarm_ends_when_the_metric_is_normal_again() -> None:
    alarms, rng = after_normal_updates()
    drive(alarms, rng, changed={"actor/kl_behaviour": 3.0}, num=6)
    assert alarms.active
    drive(alarms, rng, changed={}, num=5)
    assert not alarms.active
    assert len(drive(alarms, rng, changed={"actor/kl_behaviour": 3.0}, num=6)) == 2


def test_a_collapse_does_not_become_the_new_normal() -> None:
    alarms, rng = after_normal_updates()
    drive(alarms, rng, changed={"response_length/mean": 4000.0}, num=200)
    assert alarms.active == {"drift:response_length/mean"}
    assert alarms.last_good_update == NUM_NORMAL - 1


def test_acknowledging_makes_the_new_level_the_reference() -> None:
    alarms, rng = after_normal_updates()
    drive(alarms, rng, changed={"response_length/mean": 4000.0}, num=6)
    alarms.acknowledge("drift:response_length/mean")
    assert drive(alarms, rng, changed={"response_length/mean": 4000.0}, num=40) == []
    assert not alarms.active


@pytest.mark.parametrize("flat", [0.0, 1.0])
def test_b72_flat_reward_alarms(flat: float) -> None:
    alarms = CollapseAlarms(AlarmConfig(flat_reward_updates=8))
    events = [e for update in range(10) for e in alarms.observe(update=update, metrics={"critic/score/mean": flat})]
    assert [(e.rule, e.update) for e in events] == [("flat_reward", 7)]


def test_a_non_finite_metric_alarms_at_once() -> None:
    alarms, rng = after_normal_updates()
    events = drive(alarms, rng, changed={"actor/entropy": float("nan")}, num=1)
    assert [e.rule for e in events] == ["non_finite"]


def test_absent_metrics_are_not_judged() -> None:
    assert CollapseAlarms().observe(update=0, metrics={}) == []


def test_state_survives_json() -> None:
    alarms, rng = after_normal_updates()
    drive(alarms, rng, changed={"actor/entropy": 0.005}, num=4)
    resumed = CollapseAlarms()
    resumed.load_state_dict(json.loads(json.dumps(alarms.state_dict())))
    events = resumed.observe(update=NUM_NORMAL + 4, metrics=normal(rng) | {"actor/entropy": 0.005})
    assert {e.rule for e in events} == {"limit", "drift"}
    assert resumed.last_good_update == NUM_NORMAL - 1


def test_useless_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="patience >= 1"):
        AlarmConfig(patience=0)
