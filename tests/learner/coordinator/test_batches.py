"""Plans, shards, replay, abandoned steps, deletion of old segments, records, evaluation, status."""

import json
from pathlib import Path

from protocol import messages as m
from tests.learner.coordinator.harness import answer, trained


def train_batches(h, number, *, attempt=1, score=None):
    plans = []
    for _ in range(number):
        version = h.coordinator.facts.policy_version
        for lease in h.lease("g/1", version=version):
            for slot in lease.slots:
                h.ask("r/1", *answer(lease, slot, score=float(slot) if score is None else score))
        request = m.BatchRequest(after_batch_id=h.coordinator.facts.last_batch, policy_version=version, wait_s=0)
        plan = h.ask("t/1", request)
        assert isinstance(plan, m.BatchPlan), plan
        h.ask("t/1", trained(plan, attempt=attempt))
        plans.append(plan)
    return plans


def joined(h):
    for role, name in (("generator", "g"), ("rewardd", "r"), ("trainer", "t")):
        h.join(role, name)
    return h


def resume(h, at, *, version=0, num_ranks=1):
    return h.ask("t/1", m.ResumeRequest(last_batch_id=at, policy_version=version, num_ranks=num_ranks))


def test_b78_every_prompt_of_a_pass_is_trained_once_through_crashes(build):
    h = joined(build(11, **{"run.max_passes": 1, "run.max_updates": 100}))
    resume(h, 0)
    seen = []
    for batch in range(6):
        seen += [item.prompt_id for item in train_batches(h, 1)[0].items]
        h.crash()
        joined(h)
        resume(h, batch + 1)
    assert sorted(seen) == sorted(2 * [prompt.prompt_id for prompt in h.train.prompts])
    h.turn()
    assert h.coordinator.facts.state == "finished"  # the last batch held the one group that was left
    assert h.summary()["trained"] == 22


def test_a_killed_trainer_replays_the_batches_after_its_checkpoint_in_order(build):
    h = joined(build(60, **{"run.max_updates": 20}))
    assert resume(h, 0).attempt == 1
    plans = train_batches(h, 3)
    h.crash()
    joined(h)
    plan = resume(h, 1, version=1, num_ranks=2)
    assert (plan.attempt, plan.replay) == (2, [2, 3])
    for batch_id in plan.replay:
        again = h.ask("t/1", m.BatchRequest(after_batch_id=batch_id - 1, policy_version=1, wait_s=0))
        assert again.items == plans[batch_id - 1].items and len(again.micro_batches) == 2
        shard = h.ask("t/1", m.ShardRequest(batch_id=batch_id, rank=1, num_ranks=2))
        assert shard.indices == sorted(i for micro in again.micro_batches[1] for i in micro)
        assert h.ask("t/1", trained(again, attempt=2, replayed=True)).detail == "counted before"
    assert h.summary()["trained"] == 12
    new = train_batches(h, 1, attempt=2)[0]
    assert new.batch_id == 4 and new.policy_version == 3


def test_shard_arrays_are_what_was_sampled(build):
    h = joined(build())
    resume(h, 0)
    for lease in h.lease("g/1"):
        for slot in lease.slots:
            h.ask("r/1", *answer(lease, slot, num_tokens=3 + slot))
    plan = h.ask("t/1", m.BatchRequest(after_batch_id=0, policy_version=0, wait_s=0))
    h.give("t/1", m.ShardRequest(batch_id=1, rank=0, num_ranks=1))
    shard = h.turn()[0]
    for index in shard.body.indices:
        item = plan.items[index]
        tokens = shard.arrays[f"{index}/token_ids"]
        assert len(tokens) == item.num_prompt_tokens + item.num_response_tokens
        assert set(tokens[item.num_prompt_tokens :].tolist()) == {65 + item.slot}
        for name in ("logp_behaviour", "versions", "loss_mask"):
            assert len(shard.arrays[f"{index}/{name}"]) == item.num_response_tokens
    assert h.ask("t/1", m.ShardRequest(batch_id=9, rank=0, num_ranks=1)).code == "no_shard"


def test_checkpoint_newer_than_the_last_report_counts_the_batch(build):
    h = joined(build(40))
    resume(h, 0)
    train_batches(h, 1)
    for lease in h.lease("g/1", version=1):
        for slot in lease.slots:
            h.ask("r/1", *answer(lease, slot))
    plan = h.ask("t/1", m.BatchRequest(after_batch_id=1, policy_version=1, wait_s=0))
    assert resume(h, plan.batch_id, version=2).replay == []
    assert h.coordinator.facts.policy_version == 2 and h.summary()["trained"] == 8
    assert resume(h, 9).code == "unknown_checkpoint"


def test_b65_resuming_from_an_earlier_step_by_choice_abandons_the_later_ones(build):
    h = joined(build(40, **{"run.max_updates": 20}))
    resume(h, 0)
    train_batches(h, 4)
    h.ask("g/1", m.Heartbeat(state="serving", policy_version=4))
    before = h.summary()
    h.config = h.config.model_copy(
        update={
            "learner": h.config.learner.model_copy(
                update={"checkpoint": h.config.learner.checkpoint.model_copy(update={"resume_from": "step_2"})}
            )
        }
    )
    h.crash()
    joined(h)
    h.ask("g/1", m.Heartbeat(state="serving", policy_version=4))
    plan = resume(h, 2, version=2)
    assert plan.replay == [] and plan.published_version == 1  # version 2 is published again
    after = h.summary()
    assert after["trained"] == 8 and after["in_flight"] == 0 and after["balanced"]
    assert after["retired"] == before["trained"] - 8 + before["in_flight"]
    assert h.store.counters["abandoned_batches"] == 2
    assert h.lease("g/1", version=4) == []  # it holds weights of the abandoned steps
    plans = train_batches(h, 2, attempt=plan.attempt)
    assert [p.batch_id for p in plans] == [3, 4]
    redrawn = {item.prompt_id for p in plans for item in p.items}
    first = {r[0] for r in h.store.connection.execute("SELECT prompt_id FROM groups WHERE reason = 'abandoned'")}
    assert redrawn <= first
    assert resume(h, 2, version=2).replay == [3, 4]  # abandoned once, not at each start


def test_b38_a_resume_request_that_comes_twice_is_one_start(build):
    h = build(4)
    trainer = h.join("trainer", "t")
    request = m.ResumeRequest(last_batch_id=0, policy_version=0, num_ranks=1)
    first, second = h.ask(trainer, request), h.ask(trainer, request)
    assert first.attempt == second.attempt == 1
    later = h.join("trainer", "t", incarnation="2")
    assert h.ask(later, request).attempt == 2
    h.ask(later, m.BatchRequest(after_batch_id=0, policy_version=0, wait_s=0.0))
    assert h.ask(later, request).attempt == 3


def test_b76_records_of_both_attempts_are_kept_and_told_apart(build):
    h = joined(build(40, **{"run.max_updates": 20}))
    resume(h, 0)
    train_batches(h, 2)
    resume(h, 1, version=1)
    again = h.ask("t/1", m.BatchRequest(after_batch_id=1, policy_version=1, wait_s=0))
    h.ask("t/1", trained(again, attempt=2, replayed=True))
    h.ask("t/1", trained(again, attempt=2, replayed=True))
    records = [json.loads(x) for x in (Path(h.config.run.dir) / "metrics.jsonl").read_text().splitlines()]
    assert [(r["attempt"], r["batch_id"], r["replayed"]) for r in records] == [
        (1, 1, False),
        (1, 2, False),
        (2, 2, True),
    ]
    assert h.ask("t/1", trained(again, attempt=1)).code == "old_attempt"


def test_a_record_lost_in_a_crash_is_written_at_the_next_start(build):
    h = joined(build(40))
    resume(h, 0)
    train_batches(h, 1)
    path = Path(h.config.run.dir) / "metrics.jsonl"
    written = path.read_text()
    path.write_text(written[: len(written) // 2])  # torn by the crash
    h.crash()
    h.turn()
    assert json.loads(path.read_text().splitlines()[-1])["batch_id"] == 1


def test_segments_older_than_the_oldest_kept_checkpoint_are_deleted(build):
    overrides = {"coordinator.segment_mb": 1, "run.max_updates": 100, "sampling.max_response_tokens": 20_000}
    h = joined(build(100, **overrides, **{"learner.max_tokens_per_micro_batch": 30_000}))
    resume(h, 0)
    for batch in range(1, 9):
        for lease in h.lease("g/1", version=batch - 1):
            for slot in lease.slots:
                h.ask("r/1", *answer(lease, slot, num_tokens=20_000))
        plan = h.ask("t/1", m.BatchRequest(after_batch_id=batch - 1, policy_version=0, wait_s=0))
        h.ask("t/1", trained(plan))
        h.ask("t/1", m.CheckpointCommitted(batch_id=batch, policy_version=batch, path="p"))
        assert h.journal.num_bytes() < 6 << 20
    assert resume(h, 7, version=7).replay == [8]
    refusal = resume(h, 3, version=3)
    assert refusal.code == "replay_unavailable" and "resume_from" in refusal.reason


def test_evaluation_at_start_and_end_goes_to_eval_jsonl(build):
    overrides = {"evaluation.at_start": True, "evaluation.at_end": True, "evaluation.samples": 2, "run.max_updates": 1}
    h = joined(build(10, 3, **overrides))
    resume(h, 0)
    leases = h.lease("g/1", 9)
    assert {lease.purpose for lease in leases} == {"eval"} and sum(len(x.slots) for x in leases) == 9
    assert {lease.sampling.temperature for lease in leases} == {0.0, 1.0}
    train_leases = h.lease("g/1", 100)
    assert {lease.purpose for lease in train_leases} == {"train"}
    for lease in train_leases:
        for slot in lease.slots:
            h.ask("r/1", *answer(lease, slot, score=float(slot)))
    waiting = h.ask("t/1", m.BatchRequest(after_batch_id=0, policy_version=0, wait_s=0))
    assert isinstance(waiting, m.BatchNotReady)  # version 0 is evaluated before anything changes it
    for lease in leases:
        for slot in lease.slots:
            h.ask("r/1", *answer(lease, slot, score=float(lease.sampling.temperature == 0.0)))
    h.update("t/1", version=0)
    assert h.coordinator.facts.state == "evaluating"
    assert h.lease("g/1", version=0) == []
    h.crash()
    joined(h)
    for lease in h.lease("g/1", version=1):
        assert lease.purpose == "eval"
        for slot in lease.slots:
            h.ask("r/1", *answer(lease, slot, score=float(slot)))
    assert h.coordinator.facts.state == "finished"
    records = [json.loads(x) for x in (Path(h.config.run.dir) / "eval.jsonl").read_text().splitlines()]
    found = [(r["policy_version"], r["kind"], r["k"], r["num_prompts"], r["mean"]) for r in records]
    assert found == [
        (0, "greedy", 1, 3, 1.0),
        (0, "avg@k", 2, 3, 0.0),
        (1, "greedy", 1, 3, 0.0),
        (1, "avg@k", 2, 3, 0.5),
    ]
    assert h.summary()["trained"] == 4 and h.summary()["balanced"]


def test_b70_groups_in_a_batch_always_have_their_full_size(build):
    h = joined(build(40, **{"run.max_updates": 20}))
    resume(h, 0)
    for plan in train_batches(h, 4):
        sizes = {}
        for item in plan.items:
            sizes.setdefault(item.group_id, set()).add(item.slot)
        assert list(sizes.values()) == [{0, 1}, {0, 1}]
        assert len({(item.group_id, item.prompt_id) for item in plan.items}) == 2


def test_b75_status_names_every_role_and_what_it_waits_for(build):
    h = joined(build())
    operator = h.join("client", "cli")
    h.ask("g/1", m.Heartbeat(state="serving", waiting_for="leases", policy_version=0, progress_age_s=3.0))
    status = h.ask(operator, m.StatusRequest())
    roles = {role.name: role for role in status.roles}
    assert set(roles) == {"coordinator", "g", "r", "t"}
    assert roles["g"].waiting_for == "leases" and roles["coordinator"].waiting_for == "generation"
    h.coordinator.gone("g/1", orderly=False)
    status = h.ask(operator, m.StatusRequest())
    assert {role.name: role.state for role in status.roles}["g"] == "gone"
    assert any("missing_generators" in alarm for alarm in status.alarms)


def test_b71_an_alarm_can_pause_the_run(build):
    h = joined(build(60, **{"alarms.action": "pause", "alarms.flat_reward_updates": 3, "run.max_updates": 20}))
    resume(h, 0)
    train_batches(h, 3, score=0.0)
    assert h.coordinator.facts.paused
    assert any("rollout/reward_mean" in alarm for alarm in h.coordinator.status().alarms)
    h.crash()
    assert any("rollout/reward_mean" in alarm for alarm in h.coordinator.status().alarms)


def test_b71_while_an_alarm_is_on_plans_name_the_last_good_batch(build):
    h = joined(build(60, **{"alarms.flat_reward_updates": 3, "run.max_updates": 20, "algorithm.max_staleness": 0}))
    resume(h, 0)
    assert [plan.protected_batch_id for plan in train_batches(h, 2)] == [-1, -1]
    train_batches(h, 3, score=0.0)
    h.crash()
    joined(h)
    resume(h, 5, version=5)
    assert train_batches(h, 1, score=0.0)[0].protected_batch_id == 2, "the last with a signal"


def test_stages_filter_groups_from_a_step_on_without_a_restart(build):
    stages = [{"from_update": 1, "filter_groups": "equal_rewards"}]
    h = joined(build(60, **{"stages": stages, "run.max_updates": 20, "algorithm.max_staleness": 0}))
    resume(h, 0)
    first = train_batches(h, 1, score=1.0)[0]
    assert {item.stage for item in first.items} == {0} and h.summary()["filtered"] == 0
    for lease in h.lease("g/1", version=1):
        for slot in lease.slots:
            h.ask("r/1", *answer(lease, slot, score=1.0))
    assert h.summary()["filtered"] == 4, "both groups of the second batch had no signal"
    second = train_batches(h, 1)[0]
    assert {item.stage for item in second.items} == {1} and second.stage == 1


def test_stages_change_lengths_and_a_metric_starts_one_early(build):
    stages = [
        {"from_update": 3, "max_response_tokens": 100},
        {"from_update": 50, "temperature": 0.5, "when_metric": "rollout/truncated_fraction", "above": -1.0},
    ]
    h = joined(build(60, **{"stages": stages, "run.max_updates": 20}))
    resume(h, 0)
    first = h.lease("g/1", 2)[0]
    assert first.sampling.max_tokens == 64 and first.stage == 0
    for slot in first.slots:
        h.ask("r/1", *answer(first, slot))
    train_batches(h, 1)
    later = h.lease("g/1", version=1)
    assert {lease.stage for lease in later if lease.attempt == 1} == {2}
    assert later[0].sampling.temperature == 0.5
