import pytest

from learner.algorithms.filters import GroupFilter, SolvedPrompts, group_metrics, has_signal, malformed_groups


def test_b70_malformed_groups_are_named_with_the_reason() -> None:
    bad = malformed_groups(
        ["a", "a", "b", "c", "c", "d", "d", None],
        prompts=["p", "p", "q", "r", "s", "t", "t", "u"],
        group_size=2,
    )
    assert bad == {
        "b": "group b has 1 answers instead of 2",
        "c": "group c mixes 2 prompts",
        None: "1 trajectories have no group id",
    }
    assert len(malformed_groups(["x", "y", "z"], prompts=["p", "p", "p"], group_size=3)) == 3


def test_signal_is_any_difference() -> None:
    assert has_signal([0.0, 1.0]) and has_signal([0.5, 0.5, 0.4])
    assert not has_signal([0.1, 0.1]) and not has_signal([1.0])


def test_b72_filtering_ends_with_an_alarm_and_training_goes_on() -> None:
    group_filter = GroupFilter(rule="equal_rewards", max_in_a_row=3)
    flat = [group_filter.admit([0.0, 0.0]) for _ in range(5)]
    assert [a.keep for a in flat] == [False, False, False, True, True]
    assert [a.alarm for a in flat] == [False, False, True, False, False]
    assert "without signal" in flat[3].reason
    assert group_filter.admit([0.0, 1.0]).keep
    assert not group_filter.admit([1.0, 1.0]).keep  # the rule is back
    assert group_filter.counts == {"filtered": 4, "kept_without_signal": 2, "kept": 1}


def test_without_a_rule_groups_without_signal_are_trained_and_counted() -> None:
    group_filter = GroupFilter()
    assert group_filter.admit([1.0, 1.0]).keep
    assert group_filter.counts == {"kept_without_signal": 1}


def test_filter_resumes_from_its_state() -> None:
    group_filter = GroupFilter(rule="equal_rewards", max_in_a_row=2)
    group_filter.admit([0.0, 0.0])
    resumed = GroupFilter(rule="equal_rewards", max_in_a_row=2)
    resumed.load_state_dict(group_filter.state_dict())
    assert resumed.admit([0.0, 0.0]).alarm
    assert resumed.counts["filtered"] == 2


def test_a_prompt_is_retired_after_being_solved_in_a_row() -> None:
    solved = SolvedPrompts(times=2)
    assert [solved.observe("p", r) for r in ([1, 1], [1, 0], [1, 1], [1, 1])] == [False, False, False, True]
    resumed = SolvedPrompts(times=2)
    resumed.load_state_dict(solved.state_dict())
    assert resumed.is_retired("p") and not resumed.is_retired("q")


def test_group_metrics_are_shares() -> None:
    assert group_metrics([[0, 0], [1, 1], [0, 1], [0.5, 0.5]]) == {
        "batch/solve_none": 0.25,
        "batch/solve_all": 0.25,
        "batch/solve_partly": 0.5,
        "batch/without_adv_ratio": 0.75,
    }
    assert group_metrics([]) == {}


@pytest.mark.parametrize("arguments", [{"rule": "equal"}, {"max_in_a_row": 0}])
def test_useless_settings_are_refused(arguments: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        GroupFilter(**arguments)
