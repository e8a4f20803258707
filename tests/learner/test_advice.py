"""Each advisory: holds at figures that call for it, is silent at healthy and at missing ones, names real settings."""

import re
from pathlib import Path
from typing import Any

import pytest

from learner.advice import FEWEST_BATCHES, RULES, advise, means
from learner.coordinator.fleet import FleetMeter
from learner.coordinator.members import Members
from protocol import messages as m
from protocol.config.keys import leaf_fields
from protocol.config.load import build_config
from protocol.metrics import find, unregistered
from protocol.versions import make_hello

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tuning.md"
CASES: list[tuple[str, dict[str, float], dict[str, Any], str]] = [
    ("generation", {"time_share/trainer/generation": 0.5, "fleet/generators": 2}, {}, "generators=4"),
    ("generation", {"time_share/trainer/generators": 0.4}, {}, "generators=2"),
    ("paced", {"time_share/generators/staleness": 0.5, "fleet/generators": 4}, {}, "2 of 4 generators would do"),
    ("paced", {"time_share/generators/staleness": 0.5}, {}, "algorithm.max_staleness = 2"),
    ("reward", {"time_share/trainer/reward": 0.2, "fleet/reward_daemons": 2}, {}, "rewardd=3"),
    ("reward", {"fleet/reward_queue_oldest_s": 1e4}, {}, "the oldest 10000 s"),
    ("reward", {"fleet/reward_queue_depth": 1e6}, {}, "1000000 answers held"),
    ("kv_cache", {"fleet/kv_demand": 1.6}, {"generators.max_num_seqs": 64}, "max_num_seqs to 40"),
    ("kv_cache", {"fleet/kv_demand": 1.6}, {"generators.gpu_memory_utilization": 0.5}, "raise it to 0.9"),
    ("kv_cache", {"fleet/kv_demand": 1.6}, {"generators.device": "cpu"}, "raise generators.cpu_kv_cache_gb"),
    ("kv_cache", {"fleet/kv_demand": 0.25, "fleet/slots_used": 1.0}, {}, "raise generators.max_num_seqs to 204"),
    ("packing", {"packing/fill_fraction": 0.5}, {"learner.max_tokens_per_micro_batch": 8192}, "towards 4096"),
    ("weights", {"time_share/generators/weights": 0.2}, {}, "of their time on new weights"),
    ("weights", {"time_share/trainer/weights": 0.2}, {"weights.snapshot": "host"}, "weights.snapshot = device"),
    ("checkpoint", {"time_share/trainer/checkpoint": 0.2}, {}, "every_updates = 20"),
    (
        "checkpoint",
        {"time_share/trainer/disk": 0.2},
        {"learner.checkpoint.in_background": False},
        "in_background = true",
    ),
    ("stale", {"staleness/masked_share": 0.1}, {"algorithm.max_staleness": 2}, "algorithm.max_staleness = 3"),
    ("effective_sample_size", {"importance/ess": 0.3}, {"algorithm.max_staleness": 2}, "algorithm.max_staleness = 1"),
    ("effective_sample_size", {"importance/ess": 0.3}, {"algorithm.max_staleness": 0}, "probs_diff_mean"),
    ("no_signal", {"rollout/equal_reward_groups": 0.8}, {}, "algorithm.filter_groups = equal_rewards"),
    (
        "no_signal",
        {"rollout/equal_reward_groups": 0.8, "rollout/reward_mean": 0.9},
        {"algorithm.filter_groups": "equal_rewards"},
        "harder prompts",
    ),
    ("cut", {"rollout/truncated_fraction": 0.4}, {}, "algorithm.overlong = soft_penalty"),
    ("clipped", {"actor/clip_fraction_high": 0.2, "actor/clip_fraction_low": 0.2}, {}, "40 % of the tokens"),
    ("unjudged", {"verdicts/unjudged": 10, "verdicts/wrong": 90}, {}, "10 % of the answers"),
]
HEALTHY = {
    "time_share/trainer/working": 0.8,
    "time_share/trainer/generation": 0.2,
    "time_share/generators/staleness": 0.2,
    "packing/fill_fraction": 0.9,
    "fleet/kv_demand": 0.7,
    "fleet/slots_used": 0.95,
    "staleness/masked_share": 0.0,
    "importance/ess": 0.9,
    "rollout/equal_reward_groups": 0.3,
    "rollout/truncated_fraction": 0.05,
    "actor/clip_fraction_high": 0.01,
    "verdicts/wrong": 90.0,
    "verdicts/unjudged": 1.0,
}


def config(changes: dict[str, Any]) -> Any:
    return build_config({"model": {"path": "m"}, "data": {"train_files": ["x"]}, **_tree(changes)}).config


def _tree(changes: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for dotted, value in changes.items():
        *sections, key = dotted.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return tree


@pytest.mark.parametrize(("rule", "values", "changes", "text"), CASES)
def test_a_rule_holds_in_one_line_with_the_setting(
    rule: str, values: dict[str, float], changes: dict[str, Any], text: str
) -> None:
    (found,) = advise(values, config(changes))
    assert found.rule == rule and text in found.text and "\n" not in found.text
    assert found.setting in dict(leaf_fields())
    assert not unregistered(values)


def test_healthy_and_missing_figures_are_silent() -> None:
    assert advise(HEALTHY, config({})) == [] and advise({}, config({})) == []


def test_every_rule_is_tested_and_on_the_page_with_its_settings() -> None:
    assert {case[0] for case in CASES} == {rule.name for rule in RULES}
    rows = {row[1]: row[0] for row in re.findall(r"(^\| `(\w+)` \|.*$)", PAGE.read_text(), re.MULTILINE)}
    assert rows.keys() == {rule.name for rule in RULES}
    for rule in RULES:
        assert all(f"`{setting}`" in rows[rule.name] for setting in rule.settings), rule.name
        assert all(setting in dict(leaf_fields()) for setting in rule.settings)
    named = re.findall(
        r"`((?:time_share|fleet|packing|staleness|importance|rollout|actor)/[a-z_/]+)`", PAGE.read_text()
    )
    assert named and all(find(name) for name in named)


def test_means_need_a_few_batches_and_are_over_the_records_that_have_the_figure() -> None:
    assert means([{"a": 1.0}] * (FEWEST_BATCHES - 1)) == {}
    assert means([{"a": 1.0, "text": "x"}, {"a": 3.0}, {"b": 2.0}]) == {"a": 2.0, "b": 2.0}


def test_shares_of_a_fleet_are_means_over_time_and_sum_to_1() -> None:
    members, meter = Members(), FleetMeter()
    for role, name in (("trainer", "t"), ("generator", "g0"), ("generator", "g1")):
        members.join(make_hello(role, name=name, incarnation="1"), now=0.0)
    for number in range(4):
        shares = {"working": 1.0} if number else {"waiting for generation": 1.0}
        members.get("t/1").heard(m.Heartbeat(state="x", idle_fractions=shares), now=1.0)  # type: ignore[union-attr]
        for name, running in (("g0", 8.0), ("g1", 0.0)):
            figures = {"generator/running": running, "generator/slots": 8.0, "generator/kv_demand": running / 10}
            beat = m.Heartbeat(state="x", idle_fractions={"working": 0.5, "staleness": 0.5}, metrics=figures)
            members.get(f"{name}/1").heard(beat, now=1.0)  # type: ignore[union-attr]
        meter.observe(members)
    found = meter.take()
    assert found["time_share/trainer/generation"] == 0.25 and found["time_share/trainer/working"] == 0.75
    assert found["time_share/generators/staleness"] == 0.5
    assert (found["fleet/generators"], found["fleet/slots_used"], found["fleet/kv_demand"]) == (2.0, 0.5, 0.8)
    assert meter.take() == found, "nothing was seen since: what was known before"
    assert not unregistered(found)
