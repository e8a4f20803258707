"""Any OpenAI-compatible completions server that returns token ids and log-probs (vLLM's does).

For evaluation and for fixed policies: such a server receives no weights from us, so its version stays 0.
Requests use `/v1/completions` with token ids as the prompt, `logprobs` and `return_token_ids`. The start refuses a
server that returns no ids or log-probs, or log-probs that are not those of the sampling distribution.
"""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np

from generators.backends.base import EngineFailed, RequestFailed, Sample, SampleRequest, WorkerInfo
from protocol.config import Config
from protocol.errors import UserError
from protocol.messages import SamplingParams

_HEALTH_S = 5.0
_MAX_FAILURES = 3
_COLD = 0.01
"""At this temperature the likeliest token has a log-prob near 0, unless the server leaves the temperature out."""
_MIN_COLD_LOGP = -1.0
_PROBE_PROMPTS = range(4, 12)

_PROBE_SAMPLING = SamplingParams(
    temperature=_COLD,
    top_p=1.0,
    top_k=-1,
    min_p=0.0,
    max_tokens=1,
    min_tokens=0,
    stop_token_ids=(),
    stop=(),
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=0,
)


class OpenAIBackend:
    """`Backend` over HTTP. Progress is known only when an answer is whole."""

    def __init__(self, config: Config, *, name: str) -> None:
        if not config.generators.openai_url:
            raise UserError("generators.backend = openai needs generators.openai_url, the server's base URL")
        self._config = config
        self._url = config.generators.openai_url.rstrip("/")
        self._version = -1
        self._model = ""
        self._running: dict[str, asyncio.Event] = {}
        self._next_health = 0.0
        self._failures = 0

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def worker_info(self) -> WorkerInfo:
        return WorkerInfo(num_workers=0, transports=[], device="remote", device_uuids=[])

    async def start(self, *, stage_address: str | None) -> None:
        try:
            models = await asyncio.to_thread(self._get, "/v1/models")
        except OSError as error:
            raise EngineFailed(f"generators.openai_url = {self._url} does not answer: {error}") from error
        self._model = models["data"][0]["id"]
        await asyncio.to_thread(self._probe)
        self._version = 0

    def _probe(self) -> None:
        """Samples one token after each of a few prompts at a low temperature and looks at what comes back."""
        logps = []
        for token_id in _PROBE_PROMPTS:
            request = SampleRequest(request_id="probe", prompt_token_ids=[token_id], sampling=_PROBE_SAMPLING)
            try:
                sample = self._complete(request)
            except RequestFailed as error:
                raise EngineFailed(f"generators.openai_url cannot serve this run: {error}") from error
            logps.append(float(sample.logp_behaviour[0]))
        if (middle := median(logps)) < _MIN_COLD_LOGP:
            raise EngineFailed(
                f"{self._url} has log-probs without the temperature (median {middle:.2f} nat at temperature {_COLD}):"
                " start vLLM's server with --logprobs-mode processed_logprobs"
            )

    async def sample(self, request: SampleRequest) -> Sample:
        aborted = asyncio.Event()
        self._running[request.request_id] = aborted
        call = asyncio.ensure_future(asyncio.to_thread(self._complete, request))
        ended = asyncio.ensure_future(aborted.wait())
        try:
            await asyncio.wait([call, ended], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return _sample([], [], "aborted", "")
            return call.result()
        finally:
            ended.cancel()
            del self._running[request.request_id]

    def _complete(self, request: SampleRequest) -> Sample:
        sampling = request.sampling
        body = {
            "model": self._model,
            "prompt": request.prompt_token_ids,
            "n": 1,
            "stream": False,
            "logprobs": 0,
            "return_token_ids": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "stop": list(sampling.stop),
            "ignore_eos": True,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "seed": sampling.seed,
        }
        try:
            choice = self._post("/v1/completions", body)["choices"][0]
        except OSError as error:
            raise RequestFailed(f"{self._url}: {error}") from error
        token_ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if token_ids is None or logprobs is None:
            raise RequestFailed(f"{self._url} returns no token ids or log-probs (vLLM's server does)")
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise RequestFailed(f"{self._url} ended an answer with {reason!r}")
        return _sample(token_ids, logprobs, reason, str(choice.get("stop_reason") or ""))

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id].set()

    def progress(self) -> Mapping[str, int]:
        return dict.fromkeys(self._running, 0)

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def load_version(self, policy_version: int) -> float:
        raise EngineFailed(
            f"version {policy_version} is published, but generators.backend = openai cannot receive weights"
        )

    async def check_health(self) -> None:
        if time.monotonic() < self._next_health:
            return
        self._next_health = time.monotonic() + _HEALTH_S
        try:
            await asyncio.to_thread(self._get, "/v1/models")
            self._failures = 0
        except OSError as error:
            self._failures += 1
            if self._failures >= _MAX_FAILURES:
                raise EngineFailed(f"{self._url} does not answer: {error}") from error

    def child_pids(self) -> list[int]:
        return []

    async def close(self) -> None:
        for aborted in self._running.values():
            aborted.set()

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self._url + path, timeout=_HEALTH_S) as answer:
            return json.load(answer)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self._config.coordinator.lease_max_s) as answer:
            return json.load(answer)


def _sample(token_ids: list[int], logprobs: list[float], finish_reason: Any, stop_reason: str) -> Sample:
    return Sample(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logp_behaviour=np.asarray(logprobs, dtype=np.float32),
        versions=np.zeros(len(token_ids), dtype=np.int32),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
    )
