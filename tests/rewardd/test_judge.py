"""The judge and its pools: one outcome per task, whatever happens to the workers."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from protocol.config.services import CodeSection, MathSection, RewarddSection
from protocol.errors import UserError
from rewardd.judge import CanaryFailed, Judge
from rewardd.pool import Pool, wait_readable
from rewardd.scorers import Outcome, Task, encode_truth, make_scorers
from tests.rewardd.support import wait_gone
from tests.support.wait import wait_until

OBEDIENT = {"test": "obedient"}


def section(*, num_workers: int = 2, **changes) -> RewarddSection:
    math = MathSection(num_workers=num_workers, deadline_s=1.0)
    return RewarddSection(math=math, scorers=changes.pop("scorers", OBEDIENT), **changes)


def word(text: str, *, scorer: str = "obedient") -> Task:
    return Task(scorer=scorer, response=text, truth=encode_truth("42"))


@contextmanager
def judging(config: RewarddSection) -> Iterator[Judge]:
    judge = Judge(config)
    try:
        yield judge
    finally:
        judge.close()


def outcomes(judge: Judge, num: int, *, meanwhile: Callable[[], object] = lambda: None) -> dict[int, Outcome]:
    """Turn the judge until `num` tickets have their outcome."""
    found: dict[int, Outcome] = {}

    def turn() -> bool:
        wait_readable(judge.fds(), min(0.05, judge.wait_s()))
        for ticket, outcome in judge.turn():
            assert ticket not in found
            found[ticket] = outcome
        meanwhile()
        return len(found) >= num

    wait_until(turn, deadline_s=120, what=f"{num} outcomes")
    return found


def pids(judge: Judge, *, num: int = 20) -> set[int]:
    for ticket in range(num):
        judge.submit(ticket, word("pid"))
    return {int(outcome.reason) for outcome in outcomes(judge, num).values()}


def test_math_is_judged_in_workers() -> None:
    with judging(section(scorers={})) as judge:
        for ticket, answer in enumerate(["42", "41", "\\frac{84}{2}"]):
            judge.submit(ticket, Task(scorer="math", response=f"\\boxed{{{answer}}}", truth=encode_truth("42")))
        assert [outcome.kind for _, outcome in sorted(outcomes(judge, 3).items())] == ["correct", "wrong", "correct"]
        assert judge.serves("math")


def test_b21_a_fault_of_the_verifier_is_never_a_score(plugin) -> None:
    with judging(section(max_retries=1)) as judge:
        judge.submit(0, word("raise"))
        judge.submit(1, word("unusable"))
        found = outcomes(judge, 2)
        assert (found[0].kind, found[0].reason, found[0].value) == ("unjudged", "scorer_fault", 0.0)
        assert "broken inside" in found[0].detail
        assert (found[1].kind, found[1].reason) == ("rejected", "bad_ground_truth")
        assert judge.num_retries == 1


def test_b21_a_known_pair_that_comes_out_wrong_stops_everything(plugin) -> None:
    with judging(section(scorers={"test": "liar"})) as judge:
        judge.submit(0, word("x", scorer="liar"))
        with pytest.raises(CanaryFailed, match="liar says correct"):
            outcomes(judge, 1)
        assert not judge.serves("math")


def test_b21_known_pairs_are_scored_again_while_serving() -> None:
    with judging(section(scorers={}, canary_s=0.2)) as judge:
        judge.start("math")
        pool = judge._pools["math"]
        wait_until(lambda: judge.turn() == [] and sum(w.num_done for w in pool._workers) >= 18, what="a third round")
        assert judge.serves("math")


def test_b22_an_endless_answer_times_out_its_worker_is_killed_and_others_go_on(plugin) -> None:
    with judging(section(num_workers=2)) as judge:
        before = pids(judge)
        judge.submit(100, word("spin"))
        for ticket in range(50):
            judge.submit(ticket, word("fine"))
        found = outcomes(judge, 51)
        assert (found[100].kind, found[100].reason) == ("wrong", "timeout")
        assert all(found[ticket].reason == "fine" for ticket in range(50))
        after: set[int] = set()
        wait_until(lambda: after.update(pids(judge)) or len(after) == 2, what="a replacement at full capacity")
        killed = before - after
        assert len(killed) == 1
        wait_gone(list(killed))


def test_b22_two_endless_answers_do_not_take_innocent_ones_with_them(plugin) -> None:
    with judging(section(num_workers=1)) as judge:
        words = ["fine", "spin", "fine", "fine", "spin", "fine"]
        for ticket, text in enumerate(words):
            judge.submit(ticket, word(text))
        found = outcomes(judge, len(words))
        assert [found[n].reason for n in range(6)] == ["timeout" if text == "spin" else "fine" for text in words]


def test_b22_what_was_taken_back_from_a_slow_worker_and_given_to_it_again_is_not_lost(plugin) -> None:
    with judging(section(num_workers=1)) as judge:
        pids(judge)
        words = ["slow", "spin", "fine", "slow", "spin", "fine"]
        for ticket, text in enumerate(words):
            judge.submit(ticket, word(text))
        found = outcomes(judge, len(words))
        assert [found[n].reason for n in range(6)] == ["timeout" if text == "spin" else text for text in words]


def test_a_worker_without_processor_time_is_not_the_answers_fault(plugin) -> None:
    with judging(section(num_workers=1, max_retries=1)) as judge:
        judge.submit(0, word("sleep"))
        outcome = outcomes(judge, 1)[0]
        assert (outcome.kind, outcome.reason) == ("unjudged", "worker_starved")
        assert judge.num_retries == 1


def test_a_frozen_worker_is_replaced_and_its_job_judged(plugin) -> None:
    with judging(section(num_workers=1)) as judge:
        (pid,) = pids(judge)
        os.kill(pid, signal.SIGSTOP)
        judge.submit(0, word("fine"))
        assert outcomes(judge, 1)[0].reason == "fine"
        wait_gone([pid])


def test_b23_a_dying_scorer_is_retried_then_unjudged(plugin) -> None:
    with judging(section(num_workers=1, max_retries=2)) as judge:
        judge.submit(0, word("exit"))
        judge.submit(1, word("fine"))
        found = outcomes(judge, 2)
        assert (found[0].kind, found[0].reason) == ("unjudged", "worker_died")
        assert found[1].reason == "fine"
        assert judge.num_retries >= 2


def test_b23_code_without_an_executor_is_unjudged() -> None:
    with judging(section(scorers={}, code=CodeSection(enabled=False))) as judge:
        judge.submit(0, Task(scorer="code", response="x", truth=encode_truth({"inputs": ["1"], "outputs": ["1"]})))
        outcome = outcomes(judge, 1)[0]
        assert (outcome.kind, outcome.reason) == ("unjudged", "code_disabled")


def test_kills_at_random_lose_and_falsify_nothing(plugin) -> None:
    chooser = random.Random(0)
    with judging(section(num_workers=2, max_retries=50)) as judge:
        pids(judge)
        num = 3000
        for ticket in range(num):
            judge.submit(ticket, word(str(ticket)))
        kills = 0

        def kill_one() -> None:
            nonlocal kills
            if num - judge.num_open < 150 * (kills + 1):
                return
            running = judge.pids("math")
            if running:
                kills += 1
                with suppress(ProcessLookupError):
                    os.kill(chooser.choice(running), signal.SIGKILL)

        found = outcomes(judge, num, meanwhile=kill_one)
        assert {ticket: outcome.reason for ticket, outcome in found.items()} == {n: str(n) for n in range(num)}
        assert kills > 10 and judge.num_open == 0


def test_a_killed_nursery_is_replaced(plugin) -> None:
    with judging(section(num_workers=1)) as judge:
        (worker,) = pids(judge)
        nursery = psutil.Process(worker).parent()
        assert nursery is not None
        nursery.kill()
        wait_gone([worker])
        assert pids(judge) != {worker}


def test_b22_workers_are_recycled_between_jobs(plugin) -> None:
    pool = Pool(section(), lane="math", num_workers=1, depth=4, max_jobs=5)
    try:
        seen: dict[int, str] = {}
        for job_id in range(12):
            pool.submit(job_id, word("pid"), deadline_s=5.0)

        def turn() -> bool:
            wait_readable(pool.fds(), min(0.05, pool.wait_s()))
            seen.update({job_id: outcome.reason for job_id, outcome in pool.turn()})
            return len(seen) == 12

        wait_until(turn, deadline_s=90, what="12 outcomes")
        assert pool.num_recycled >= 1 and pool.num_deaths == 0
        assert len(set(seen.values())) == pool.num_recycled + 1
    finally:
        pool.close()


def test_closing_leaves_no_process(plugin) -> None:
    with judging(section(num_workers=2)) as judge:
        workers = pids(judge)
        nursery = psutil.Process(min(workers)).ppid()
        assert nursery != os.getpid() and psutil.Process(nursery).ppid() == os.getpid()
        judge.submit(0, word("spin"))
        judge.turn()
    wait_gone([nursery, *workers])


def test_pure_scorers_are_asked_once_per_answer() -> None:
    with judging(section(scorers={})) as judge:
        task = Task(scorer="math", response="\\boxed{42}", truth=encode_truth("42"))
        judge.submit(0, task)
        outcomes(judge, 1)
        judge.submit(1, task)
        assert outcomes(judge, 1)[1].kind == "correct" and judge.num_cached == 1
        judge.submit(2, Task(scorer="math", response="\\boxed{42}", truth=encode_truth("43")))
        assert outcomes(judge, 1)[2].kind == "wrong"


def test_an_unknown_scorer_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(UserError, match=r"rewardd\.scorers\.x = nothing.*math"):
        make_scorers(RewarddSection(scorers={"x": "nothing"}))


def test_b27_an_answer_without_the_required_form_gets_nothing_and_says_which_rule_failed() -> None:
    responses = {
        "It is clearly 42.": "no_box",
        "<think>It must be \\boxed{42}": "unfinished_reasoning",
        "\\boxed{42} or \\boxed{43}": "hedge",
        "\\boxed{41 \\text{ or } 42}": "hedge",
        "I do not know": "no_box",
        "So \\boxed{42}": "equal_string",
    }
    config = section(scorers={})
    config = config.model_copy(update={"math": config.math.model_copy(update={"require_box": True})})
    with judging(config) as judge:
        for ticket, response in enumerate(responses):
            judge.submit(ticket, Task(scorer="math", response=response, truth=encode_truth("42")))
        found = outcomes(judge, len(responses))
        assert [found[n].reason for n in range(len(responses))] == list(responses.values())
        assert [found[n].value for n in range(len(responses))] == [0, 0, 0, 0, 0, 1]
        metrics = judge.metrics()
        assert (metrics["rewardd/reason/no_box"], metrics["rewardd/reason/hedge"]) == (2, 2)
