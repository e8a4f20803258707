"""Routing, shaping, ground truths and canary rounds: no processes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from protocol.config.services import CodeSection, ShapingSection
from protocol.messages import GroundTruth
from rewardd.breaker import Breaker
from rewardd.canary import CanaryBoard
from rewardd.code.limits import MIN_MEMORY_MB, Limits
from rewardd.ground_truth import MAX_BATCH, GroundTruthCache
from rewardd.routing import route
from rewardd.scorers import Canary, Outcome, Task, encode_truth
from rewardd.shaping import shape
from tests.support.fake_coordinator import ground_truth


@pytest.mark.parametrize(
    ("truth", "ability", "scorer", "decoded"),
    [
        ("42", "math", "math", "42"),
        ("025", "", "math", "025"),
        (["1/2", "0.5"], "math", "math", ["1/2", "0.5"]),
        ('["72"]', "math", "math", ["72"]),
        ("[0,2]", "math", "math", "[0,2]"),
        (7, "math", "math", 7),
        ('{"inputs": ["1"], "outputs": ["2"], "fn_name": null}', "code", "code", {"inputs": ["1"], "outputs": ["2"]}),
        ({"test_code": "def check(c): pass", "entry_point": "f"}, "", "code", None),
        (["assert f(1) == 2"], "code", "code", ["assert f(1) == 2"]),
    ],
)
def test_shape_and_ability_choose_the_scorer(truth, ability, scorer, decoded) -> None:
    routed = route(ground_truth("p", truth, ability=ability), overrides={})
    assert (routed.scorer, routed.problem) == (scorer, "")
    assert msgpack.decode(routed.truth) == (truth if decoded is None else decoded)


@pytest.mark.parametrize("truth", [None, "", [], {}, {"answer": 3}, True])
def test_a_ground_truth_without_a_scorer_is_named(truth) -> None:
    assert "prompt p" in route(ground_truth("p", truth), overrides={}).problem


def test_overrides_by_source_come_before_ability() -> None:
    item = ground_truth("p", "42", data_source="mine", ability="math")
    assert route(item, overrides={"mine": "passthrough", "math": "other"}).scorer == "passthrough"
    assert route(item, overrides={"math": "other"}).scorer == "other"


@given(st.text(max_size=60))
def test_any_payload_is_routed_or_named(payload) -> None:
    item = GroundTruth(prompt_id="p", data_source="d", ability="math", payload=payload)
    routed = route(item, overrides={})
    assert bool(routed.problem) != bool(routed.scorer)


@given(st.floats(0, 1), st.booleans(), st.sampled_from(["correct", "partial", "wrong", "unjudged", "rejected"]))
def test_only_judged_answers_have_components(value, has_form, kind) -> None:
    section = ShapingSection(correct=1.0, wrong=-1.0, format_bonus=0.25)
    outcome = Outcome(kind=kind, reason="r", value=value, has_form=has_form)
    training = shape(outcome, purpose="train", scorer="math", section=section)
    evaluation = shape(outcome, purpose="eval", scorer="math", section=section)
    if kind in ("unjudged", "rejected"):
        assert training.score == evaluation.score == 0 and not training.components
        return
    assert training.score == pytest.approx(-1 + 2 * value + 0.25 * has_form)
    assert evaluation.score == value and evaluation.components == {"correctness": value}


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_longer_answers_never_gain_and_the_penalty_is_a_part_of_its_own(one, other) -> None:
    section = ShapingSection(length_penalty=0.5, length_from=1000, length_to=2000)
    outcome = Outcome(kind="correct", reason="r", value=1.0)
    short, long = (
        shape(outcome, purpose="train", scorer="math", section=section, num_tokens=n) for n in sorted((one, other))
    )
    assert short.score >= long.score >= 0.5
    assert long.score == pytest.approx(sum(long.components.values())) and long.components["correctness"] == 1.0
    evaluation = shape(outcome, purpose="eval", scorer="math", section=section, num_tokens=3000)
    assert evaluation.score == 1.0


def test_what_scorers_measure_is_kept_apart_from_the_score() -> None:
    outcome = Outcome(kind="partial", reason="r", value=0.5, metrics={"fluency": 3.0})
    verdict = shape(outcome, purpose="train", scorer="mine", section=ShapingSection())
    assert (verdict.score, verdict.metrics) == (0.5, {"fluency": 3.0})


def test_other_scorers_get_the_prompt_and_all_extra_info() -> None:
    payload = json.dumps({"ground_truth": "1", "extra_info": {"a": 1}, "prompt": [{"role": "user", "content": "Q"}]})
    item = GroundTruth(prompt_id="p", data_source="d", ability="math", payload=payload)
    assert route(item, overrides={"d": "mine"}).extra == {"a": 1, "prompt": [{"role": "user", "content": "Q"}]}


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_a_breaker_opens_after_so_many_failures_in_a_row_and_lets_one_probe_through(results, limit) -> None:
    breaker, now, in_a_row = Breaker(num_failures=limit), 0.0, 0
    for task, judged in enumerate(results):
        if breaker.is_open:
            assert not breaker.admits(task, now=now)
            now = breaker.retry_at
            assert breaker.admits(task, now=now) and not breaker.admits(-1, now=now)
        breaker.note(task, judged=judged, is_first_try=True, now=now)
        in_a_row = 0 if judged else in_a_row + 1
        assert breaker.is_open == (in_a_row >= limit)


def test_a_task_tried_again_and_again_opens_no_breaker() -> None:
    breaker = Breaker(num_failures=2)
    for number in range(10):
        breaker.note(1, judged=False, is_first_try=number == 0, now=0.0)
    assert not breaker.is_open


def test_ground_truths_are_asked_for_once_and_bounded() -> None:
    cache = GroundTruthCache(overrides={}, max_bytes=1000)
    for number in range(MAX_BATCH + 5):
        cache.want(f"p{number}")
        cache.want(f"p{number}")
    first, second = cache.next_request(), cache.next_request()
    assert (len(first), len(second), cache.next_request()) == (MAX_BATCH, 5, [])
    assert cache.store(second, [ground_truth("p256", "1"), ground_truth("p258", "1")]) == ["p257", "p259", "p260"]
    cache.ask_again(first[:2])
    assert cache.next_request() == first[:2]
    large = [ground_truth(name, "9" * 600) for name in ("a", "b")]
    cache.store(["a", "b"], large)
    assert cache.get("a") is None and cache.get("b") is not None


def test_a_pair_that_cannot_be_judged_proves_nothing() -> None:
    canary = Canary(task=Task(scorer="math", response="x", truth=encode_truth("1")), kind="correct")
    board = CanaryBoard([canary, canary], interval_s=1000)
    assert len(board.begin()) == 2 and board.begin() == []
    assert board.note(0, Outcome(kind="correct", reason="")) == ""
    assert board.note(1, Outcome(kind="unjudged", reason="")) == ""
    assert board.is_over and not board.has_passed
    board.begin()
    for index in range(2):
        board.note(index, Outcome(kind="correct", reason=""))
    assert board.has_passed
    board.begin()
    assert "math says wrong" in board.note(0, Outcome(kind="wrong", reason="different"))


def test_payload_keeps_extra_info_scorers_need() -> None:
    payload = json.dumps({"style": "rule", "ground_truth": "1", "extra_info": {"score": 0.5, "index": 3}})
    item = GroundTruth(prompt_id="p", data_source="d", ability="math", payload=payload)
    assert route(item, overrides={"d": "passthrough"}).extra == {"score": 0.5}


def test_configuration_and_sandbox_agree_on_the_least_memory() -> None:
    assert CodeSection(memory_mb=MIN_MEMORY_MB).memory_mb == Limits(memory_mb=MIN_MEMORY_MB).memory_mb
    for section in (CodeSection, Limits):
        with pytest.raises(ValueError, match="memory_mb"):
            section(memory_mb=MIN_MEMORY_MB - 1)
