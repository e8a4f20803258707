"""What Prometheus finds at the coordinator: the run and every role, under names of the table alone."""

import json
import urllib.request
from pathlib import Path

from learner.coordinator.exporter import MetricsExporter, status_samples
from protocol import messages as m
from protocol.config.machine import free_port
from protocol.endpoint import exported
from protocol.metrics import families, unregistered
from protocol.metrics.run import RECORD_FIELDS
from tests.learner.coordinator.test_batches import joined, resume, train_batches


def run_a_little(h):
    joined(h)
    resume(h, 0)
    train_batches(h, 3)
    h.ask("r/1", m.VersionPublished(policy_version=3, epoch=1, generators=["g"], seconds=1.0))
    beat = {"idle_fractions": {"working": 0.75, "generation": 0.25}, "metrics": {"perf/update_seconds": 2.0}}
    h.ask("t/1", m.Heartbeat(state="training", policy_version=3, **beat))
    h.ask("g/1", m.Heartbeat(state="serving", policy_version=1, metrics={"generator/running": 7.0}))
    h.coordinator.gone("r/1", orderly=False)
    return h.coordinator


def test_every_name_in_status_and_records_is_in_the_table(build):
    h = build(40, **{"run.max_updates": 20})
    status = run_a_little(h).status()
    assert len(status.metrics) > 15 and not unregistered(status.metrics)
    records = [json.loads(x) for x in (Path(h.config.run.dir) / "metrics.jsonl").read_text().splitlines()]
    assert "packing/fill_fraction" in records[0] and not unregistered(records[0].keys() - RECORD_FIELDS.keys())
    found = exported(status_samples(status))
    assert {sample.name for family in found for sample in family.samples} <= families().keys()
    assert "slipstream_metric" not in {family.name for family in found}


def test_status_gives_advice_from_a_few_batches_on_and_records_hold_what_it_is_from(build):
    h = joined(build(60, **{"run.max_updates": 20, "learner.max_tokens_per_micro_batch": 4096}))
    resume(h, 0)
    waiting = {"generation": 0.8, "working": 0.2}
    for batch in range(3):
        assert not h.coordinator.status().advice
        h.ask("t/1", m.Heartbeat(state="waiting", policy_version=batch, idle_fractions=waiting))
        h.now += 2.0
        h.turn()
        train_batches(h, 1)
    advice = {found.rule: found for found in h.coordinator.status().advice}
    assert advice.keys() >= {"generation", "packing"}
    assert advice["generation"].setting == "generators.num" and "80 %" in advice["generation"].text
    records = [json.loads(x) for x in (Path(h.config.run.dir) / "metrics.jsonl").read_text().splitlines()]
    assert [record["time_share/trainer/generation"] for record in records] == [0.8] * 3
    assert not unregistered(records[-1].keys() - RECORD_FIELDS.keys())


def test_roles_carry_their_names_and_alarms_theirs(build):
    found = exported(status_samples(run_a_little(build(40, **{"run.max_updates": 20})).status()))
    samples = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in found for s in family.samples}
    assert samples["slipstream_role_up", (("name", "r"), ("role", "rewardd"))] == 0.0
    assert samples["slipstream_role_up", (("name", "g"), ("role", "generator"))] == 1.0
    share = (("cause", "generation"), ("name", "t"), ("role", "trainer"))
    assert samples["slipstream_role_time_share", share] == 0.25
    assert samples["slipstream_generator_running", (("name", "g"), ("role", "generator"))] == 7.0
    assert samples["slipstream_alarm", (("alarm", "missing_reward"),)] == 1.0
    assert samples["slipstream_verdicts_by_verdict_total", (("verdict", "wrong"),)] >= 6.0


def test_the_exporter_serves_the_newest_figures(build):
    h = build(40)
    port = free_port()
    with MetricsExporter(port) as exporter:
        exporter.update(run_a_little(h))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    assert "slipstream_policy_version 3.0" in text and 'slipstream_run_info{run="run",state="running"} 1.0' in text
