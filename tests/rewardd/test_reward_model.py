"""The scorer that asks a reward model, against a small HTTP server of the test."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from protocol.config.services import RewarddSection, RewardModelSection
from protocol.errors import UserError
from rewardd.judge import Judge
from rewardd.reward_model import EndpointFault, RewardModelScorer
from rewardd.scorers import Task, encode_truth, make_scorers
from tests.rewardd.test_judge import judging, outcomes
from tests.support.wait import wait_until


class RewardServer:
    """Values an answer by its length in words over 10; answers as vLLM does."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.broken = ""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append((self.path, body))
                status, answer = server.answer(self.path, body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if self.broken == "status":
            return 503, b"loading"
        if self.broken == "text":
            return 200, b"<html>"
        texts = body["documents"] if path == "/score" else body["input"]
        values = [len(text.split()) / 10 for text in texts]
        if self.broken == "nan":
            values[0] = float("nan")
        if self.broken == "short":
            values = values[1:]
        keyed = {
            "/score": lambda v: {"score": v},
            "/classify": lambda v: {"label": None, "probs": [1 - v, v], "num_classes": 2},
            "/pooling": lambda v: {"data": [[0.0], [v]]},
        }[path]
        data = [{"index": index} | keyed(value) for index, value in enumerate(values)]
        return 200, json.dumps({"data": data[::-1], "model": "rm"}).encode()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[RewardServer]:
    running = RewardServer()
    yield running
    running.close()


def section(url: str, **changes: Any) -> RewarddSection:
    others = {key: changes.pop(key) for key in ("max_retries", "breaker_hold_s", "breaker_failures") if key in changes}
    model = RewardModelSection(url=url, **changes)
    return RewarddSection(scorers={"test": "reward_model"}, reward_model=model, **others)


def task(response: str, prompt: str = "Say something.") -> Task:
    messages = [{"role": "user", "content": prompt}]
    return Task(scorer="reward_model", response=response, truth=encode_truth(""), extra={"prompt": messages})


def ask(judge: Judge, responses: list[str]) -> list[tuple[str, str, float]]:
    for ticket, response in enumerate(responses):
        judge.submit(ticket, task(response))
    found = outcomes(judge, len(responses))
    return [(found[n].kind, found[n].reason, round(found[n].value, 6)) for n in range(len(responses))]


@pytest.mark.parametrize("api", ["score", "classify", "pooling"])
def test_every_endpoint_is_read_and_the_value_kept(server: RewardServer, api: str) -> None:
    scorer = RewardModelScorer(section(server.url, api=api, template="{response}", high=0.5, model="rm"))
    found = scorer.score_batch([task("a b c"), task("a b c d e f"), task("")])
    assert [(o.kind, round(o.value, 6), o.metrics["reward_model"]) for o in found] == [
        ("partial", 0.6, 0.3), ("correct", 1.0, 0.6), ("wrong", 0.0, 0.0),
    ]  # fmt: skip
    ((path, body),) = server.requests
    assert path == f"/{api}" and body["model"] == "rm"
    assert api != "score" or body["queries"] == ["Say something."] * 3


@pytest.mark.parametrize("broken", ["status", "text", "nan", "short"])
def test_any_other_answer_is_a_fault(server: RewardServer, broken: str) -> None:
    server.broken = broken
    with pytest.raises(EndpointFault, match=server.url):
        RewardModelScorer(section(server.url)).score_batch([task("a"), task("b")])


def test_batches_stay_under_the_caps() -> None:
    scorer = RewardModelScorer(section("http://x", max_batch_tokens=100, max_batch=4))
    assert scorer.num_in_batch([task("x" * 120)] * 9) == 2
    assert scorer.num_in_batch([task("x" * 9000), task("y")]) == 1
    assert scorer.num_in_batch([task("x")] * 9) == 4


def test_waiting_answers_are_asked_for_together_by_the_workers(server: RewardServer) -> None:
    with judging(section(server.url, api="score", max_batch=16)) as judge:
        words = [" ".join(["w"] * (n % 10 + 1)) for n in range(200)]
        found = ask(judge, words)
        assert [value for _, _, value in found] == [round((n % 10 + 1) / 10, 6) for n in range(200)]
        sizes = [len(body["documents"]) for _, body in server.requests]
        assert sum(sizes) == 200 and max(sizes) == 16


def test_b23_an_endpoint_that_is_down_gives_unjudged_never_zero(server: RewardServer) -> None:
    server.close()
    with judging(section(server.url, max_retries=1)) as judge:
        assert {(kind, reason) for kind, reason, _ in ask(judge, ["a", "b c"])} == {("unjudged", "scorer_fault")}


def test_b23_a_scorer_that_fails_for_everything_is_left_alone_and_comes_back(server: RewardServer) -> None:
    server.broken = "status"
    with judging(section(server.url, max_batch=1, max_retries=3, breaker_failures=3, breaker_hold_s=60)) as judge:
        for ticket in range(40):
            judge.submit(ticket, task("a b"))
        wait_until(lambda: judge.turn() == [] and judge.metrics().get("rewardd/breaker/reward_model/open") == 1)
        server.broken = ""
        found = outcomes(judge, 40)
        assert sum(outcome.kind == "partial" for outcome in found.values()) >= 40 - 2 * 3
        assert judge.metrics()["rewardd/breaker/reward_model/open"] == 0


def test_b23_what_is_held_back_too_long_ends_unjudged(server: RewardServer) -> None:
    server.broken = "status"
    with judging(section(server.url, max_batch=1, max_retries=0, breaker_failures=2, breaker_hold_s=0.2)) as judge:
        assert [(kind, reason) for kind, reason, _ in ask(judge, ["a"] * 4)] == [("unjudged", "scorer_fault")] * 4
        assert ("unjudged", "circuit_open", 0.0) in ask(judge, ["a"] * 20)


def test_the_scorer_needs_its_url() -> None:
    with pytest.raises(UserError, match=r"rewardd\.reward_model\.url"):
        make_scorers(RewarddSection(scorers={"x": "reward_model"}))
