"""A real vLLM engine with its weight link and publisher, driven from the test's thread."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from generators.backends.base import Sample, SampleRequest
from learner.weights.publisher import Publisher
from learner.weights.snapshot import Snapshot
from protocol.messages import SamplingParams, VersionPublished
from protocol.sockets import make_hello
from tests.generators.support import make_config, sampling_params
from tests.support.wait import wait_until

NUM_IDS = 259
TEMPERATURE = 0.5


class Engine:
    """A backend with its weight link, driven from the test's thread."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        from generators.backends.vllm import VllmBackend
        from generators.weights.joining import Joining

        self.folder = folder
        config = make_config(str(folder), run_dir=str(run_dir))
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        hello = make_hello("generator", name="g0", tokenizer_hash="hash")

        async def start() -> None:
            self.backend = VllmBackend(config, name="g0")
            self.joining = Joining(config, hello=hello, backend=self.backend)
            await self.joining.start_engine()

        self.wait(start())
        self.reports: list[VersionPublished] = []
        self.publisher = Publisher(config, tokenizer_hash="hash", on_published=self.reports.append)
        self.wait(self.joining.follow(self.publisher.address, published_version=0))
        wait_until(lambda: self.publisher.status()["members"] == ["g0"], what="membership")

    def wait(self, coroutine: Any, deadline_s: float = 120.0) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(deadline_s)

    def submit(self, requests: list[SampleRequest]) -> list[Any]:
        return [asyncio.run_coroutine_threadsafe(self.backend.sample(request), self.loop) for request in requests]

    def sample(self, requests: list[SampleRequest]) -> list[Sample]:
        return [future.result(120.0) for future in self.submit(requests)]

    def publish(self, folder: Path, version: int) -> None:
        tensors = list(load_file(folder / "model.safetensors").items())
        self.publisher.submit(Snapshot(policy_version=version, tensors=tensors))
        assert self.publisher.wait_idle(60.0)
        assert self.publisher.status()["holders"] == ["g0"], self.publisher.status()
        assert self.backend.policy_version == version

    def close(self) -> None:
        self.publisher.close()
        self.wait(self.joining.close())
        self.wait(self.backend.close())


def requests(
    tag: str, count: int, *, prompt: list[int] | None = None, sampling: SamplingParams | None = None
) -> list[SampleRequest]:
    return [
        SampleRequest(
            request_id=f"{tag}/{i}",
            prompt_token_ids=prompt or list(range(40 + i, 90 + i)),
            sampling=sampling or sampling_params(temperature=TEMPERATURE, max_tokens=80, stop_token_ids=()),
        )
        for i in range(count)
    ]


def log_ratio(folder: Path, request: SampleRequest, sample: Sample) -> np.ndarray:
    """|log pi_reference - log pi_behaviour| of each sampled token, [R], by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    num_prompt = len(request.prompt_token_ids)
    ids = torch.tensor([request.prompt_token_ids + sample.token_ids.tolist()])
    with torch.no_grad():
        logits = model(ids).logits[0, num_prompt - 1 : -1, :NUM_IDS]
    logp = torch.log_softmax(logits / request.sampling.temperature, dim=-1).gather(1, ids[0, num_prompt:, None])[:, 0]
    return np.abs(logp.numpy() - sample.logp_behaviour)
