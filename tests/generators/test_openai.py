"""The OpenAI-compatible backend against vLLM's own server, and against servers that cannot serve a run."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from generators.backends.base import EngineFailed, RequestFailed, Sample, SampleRequest
from generators.backends.openai import OpenAIBackend
from tests.generators.support import make_config, sampling_params
from tests.support.roles import free_port
from tests.support.tiny_model import build_tiny_model
from tests.support.wait import wait_until


def backend(url: str) -> OpenAIBackend:
    return OpenAIBackend(make_config("none", run_dir="none", backend="openai", openai_url=url), name="g0")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=1) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def serve(model: Path, log: Path, *options: str) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--enforce-eager", "--max-model-len", "512", "--host", "127.0.0.1", "--dtype", "float32", *options]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": ""}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    return process, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_samples_of_vllms_server_are_exact(model: Path, tmp_path: Path) -> None:
    process, url = serve(model, tmp_path / "log", "--logprobs-mode", "processed_logprobs")
    try:
        wait_until(
            lambda: answers(url) or process.poll() is not None, deadline_s=300, what=(tmp_path / "log").read_text()
        )
        samples = asyncio.run(several(url))
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    assert {sample.num_tokens for sample in samples} == {12}
    for sample in samples:
        expected = reference_logp(model, sample, temperature=0.5)
        assert np.abs(expected - sample.logp_behaviour).max() < 5e-3
        assert sample.finish_reason == "length" and (sample.versions == 0).all()


async def several(url: str) -> list[Sample]:
    client = backend(url)
    await client.start(stage_address=None)
    assert client.policy_version == 0
    sampling = sampling_params(max_tokens=12, min_tokens=12, temperature=0.5)
    requests = [
        SampleRequest(request_id=str(i), prompt_token_ids=[70, 71, 72, 73], sampling=sampling) for i in range(4)
    ]
    return list(await asyncio.gather(*(client.sample(request) for request in requests)))


def reference_logp(model: Path, sample: Sample, *, temperature: float) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([[70, 71, 72, 73, *sample.token_ids.tolist()]])
    with torch.no_grad():
        logp = torch.log_softmax(network(ids).logits[0, 3:-1].double() / temperature, -1)
    return logp.gather(1, ids[0, 4:, None])[:, 0].numpy()


class Pretender:
    """A completions server that answers with what `choice` makes of a request."""

    def __init__(self, choice: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply({"data": [{"id": "m"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply({"choices": [choice(body)]})

            def reply(self, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def pretend() -> Iterator[Callable[..., str]]:
    servers: list[Pretender] = []

    def start(choice: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
        servers.append(Pretender(choice))
        return servers[-1].url

    yield start
    for pretender in servers:
        pretender.server.shutdown()
        pretender.server.server_close()


def choice(**changes: Any) -> dict[str, Any]:
    good = {"token_ids": [5], "logprobs": {"token_logprobs": [-0.01]}, "finish_reason": "length"}
    return {**good, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": None}, "no token ids"),
        ({"logprobs": None}, "no token ids or log-probs"),
        ({"finish_reason": "error"}, "ended an answer with 'error'"),
        ({"logprobs": {"token_logprobs": [-4.0]}}, "--logprobs-mode processed_logprobs"),
    ],
)
def test_a_server_that_cannot_serve_a_run_is_refused_at_the_start(
    pretend: Callable[..., str], changes: dict[str, Any], message: str
) -> None:
    client = backend(pretend(lambda body: choice(**changes)))
    with pytest.raises(EngineFailed, match=message):
        asyncio.run(client.start(stage_address=None))
    assert client.policy_version == -1


def test_an_absent_server_is_named(pretend: Callable[..., str]) -> None:
    with pytest.raises(EngineFailed, match="does not answer"):
        asyncio.run(backend(f"http://127.0.0.1:{free_port()}").start(stage_address=None))


def test_lengths_that_do_not_agree_fail_the_request_alone(pretend: Callable[..., str]) -> None:
    def odd(body: dict[str, Any]) -> dict[str, Any]:
        return choice() if body["max_tokens"] == 1 else choice(token_ids=[5, 6])

    async def scene() -> None:
        client = backend(pretend(odd))
        await client.start(stage_address=None)
        await client.sample(SampleRequest(request_id="a", prompt_token_ids=[1], sampling=sampling_params()))

    with pytest.raises(RequestFailed, match="2 tokens, 1 log-probs"):
        asyncio.run(scene())
