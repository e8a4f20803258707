"""A reward model behind an HTTP endpoint as a scorer: `rewardd.scorers: {SOURCE: reward_model}`.

Endpoints as vLLM 0.32 serves them (and servers that follow it): POST /score {"queries", "documents"} -> data[].score;
POST /classify {"input"} -> data[].probs; POST /pooling {"input"} -> data[].data. The value v of an answer becomes
(v - low) / (high - low), cut to [0, 1]; the value itself is kept as the metric `reward_model`. A server that cannot be
reached, or answers anything else, is a fault: the answers of that request are unjudged and tried again.
"""

import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from protocol.config.services import RewarddSection
from protocol.messages import VerdictKind
from rewardd.scorers import Canary, Lane, Outcome, Task

BYTES_PER_TOKEN = 3
DEADLINE_MARGIN_S = 2.0
PATHS = {"score": "/score", "classify": "/classify", "pooling": "/pooling"}


class EndpointFault(RuntimeError):
    """The endpoint gave no usable answer."""


def prompt_text(task: Task) -> str:
    """The text of the prompt's messages; "" without any."""
    prompt = task.extra.get("prompt")
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(str(message.get("content", "")) for message in prompt or [])


class RewardModelScorer:
    """One request for as many waiting answers as fit under `max_batch_tokens` and `max_batch`."""

    name = "reward_model"
    lane: Lane = "remote"
    pure = False

    def __init__(self, section: RewarddSection) -> None:
        self._section = section.reward_model
        self.deadline_s = self._section.deadline_s + DEADLINE_MARGIN_S

    def num_in_batch(self, tasks: Sequence[Task]) -> int:
        """How many tasks one request takes; one that is over the cap alone goes alone."""
        tokens = 0
        for count, task in enumerate(tasks[: self._section.max_batch]):
            tokens += math.ceil(len((prompt_text(task) + task.response).encode()) / BYTES_PER_TOKEN)
            if count and tokens > self._section.max_batch_tokens:
                return count
        return min(len(tasks), self._section.max_batch)

    def score(self, task: Task) -> Outcome:
        """One answer alone."""
        return self.score_batch([task])[0]

    def score_batch(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Raises EndpointFault."""
        section = self._section
        body: dict[str, Any] = {"model": section.model} if section.model else {}
        if section.api == "score":
            body |= {"queries": [prompt_text(t) for t in tasks], "documents": [t.response for t in tasks]}
        else:
            parts = [(prompt_text(t), t.response) for t in tasks]
            body["input"] = [section.template.replace("{prompt}", p).replace("{response}", r) for p, r in parts]
        return [self._outcome(value) for value in self._values(self._post(body), len(tasks))]

    def _post(self, body: dict[str, Any]) -> Any:
        section = self._section
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(section.api_key_env, "") if section.api_key_env else ""
        if key:
            headers["Authorization"] = f"Bearer {key}"
        url = section.url.rstrip("/") + PATHS[section.api]
        request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=section.deadline_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise EndpointFault(f"{url}: status {error.code}: {error.read(300)!r}") from error
        except (OSError, ValueError) as error:
            raise EndpointFault(f"{url}: {error}") from error

    def _values(self, answer: Any, num: int) -> list[float]:
        """One finite number per answer, in the order asked."""
        try:
            values = dict[int, float]()
            for item in answer["data"]:
                value = item["score" if self._section.api == "score" else self._field]
                while isinstance(value, list):
                    value = value[self._section.label if not isinstance(value[0], list) else -1]
                values[int(item["index"])] = float(value)
            ordered = [values[index] for index in range(num)]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EndpointFault(f"unexpected answer of {self._section.url}: {json.dumps(answer)[:300]}") from error
        if len(values) != num or not all(math.isfinite(value) for value in ordered):
            raise EndpointFault(f"{self._section.url} answered {len(values)} values for {num}, or not finite ones")
        return ordered

    @property
    def _field(self) -> str:
        return "probs" if self._section.api == "classify" else "data"

    def _outcome(self, value: float) -> Outcome:
        section = self._section
        score = min(1.0, max(0.0, (value - section.low) / (section.high - section.low)))
        kind: VerdictKind = "correct" if score == 1 else "partial" if score > 0 else "wrong"
        return Outcome(kind=kind, reason="reward_model", value=score, has_form=True, metrics={"reward_model": value})

    def canaries(self) -> list[Canary]:
        """None: nobody knows what the model should say."""
        return []
