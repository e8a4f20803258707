"""A generator without its service, in a process of its own: an engine behind a real weight link, told what to do.

Run as `python -m tests.benchmarks.generator_peer CONFIG_JSON NAME PUBLISHER_ADDRESS TOKENIZER_HASH`. Commands come as
JSON lines on standard input; replies go out as lines that start with `MARK`. With SLIPSTREAM_BENCH_DIE_IN=N it kills
itself in the middle of its N-th transfer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from typing import Any

from generators.backends import make_backend
from generators.backends.base import SampleRequest
from generators.weights.link import WeightLink
from protocol.config import Config
from protocol.messages import SamplingParams
from protocol.sockets import make_hello

MARK = "@@"


def say(**fields: Any) -> None:
    """One reply."""
    print(MARK + json.dumps(fields), flush=True)


def die_in_transfer(number: int) -> None:
    """Arranges for SIGKILL when the second bucket of the `number`-th transfer is about to be received."""
    from generators.weights.stage import Stage

    prepare, buffer, transfers = Stage.prepare, Stage.buffer, itertools.count(1)
    current = [0]

    def counted(self: Stage, *args: Any, **kwargs: Any) -> None:
        current[0] = next(transfers)
        prepare(self, *args, **kwargs)

    def deadly(self: Stage, bucket: int) -> Any:
        if current[0] >= number and bucket == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return buffer(self, bucket)

    Stage.prepare, Stage.buffer = counted, deadly  # type: ignore[method-assign]


class Load:
    """Requests that are asked again and again, and the tokens sampled for them so far, every 10 ms."""

    def __init__(self, backend: Any, *, num_requests: int, num_tokens: int) -> None:
        self._backend = backend
        self._sampling = SamplingParams(
            temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, max_tokens=num_tokens, min_tokens=0, stop_token_ids=(),
            stop=(), repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, seed=None,
        )  # fmt: skip
        self._finished = 0
        self.series: list[tuple[float, int]] = []
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(num_requests)]
        self._tasks.append(asyncio.create_task(self._watch()))

    async def _ask(self, number: int) -> None:
        for turn in itertools.count():
            prompt = [(number * 7 + i) % 200 for i in range(32)]
            request = SampleRequest(
                request_id=f"load/{number}/{turn}", prompt_token_ids=prompt, sampling=self._sampling
            )
            sample = await self._backend.sample(request)
            self._finished += sample.num_tokens

    async def _watch(self) -> None:
        while True:
            self.series.append((time.monotonic(), self._finished + sum(self._backend.progress().values())))
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Ends all requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def native_update(engine: Any, update: dict[str, Any], *, each: bool) -> float:
    """Seconds from pause to resume of vLLM's own "ipc" engine: in one call, or one call per parameter."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    chunks = [update]
    if each:
        keys = ("names", "dtype_names", "shapes", "ipc_handles")
        chunks = [{key: [update[key][i]] for key in keys} for i in range(len(update["names"]))]
    requests = [WeightTransferUpdateRequest(update_info=dict(chunk)) for chunk in chunks]
    started = time.monotonic()
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.start_weight_update()
    for request in requests:
        await engine.update_weights(request)
    await engine.finish_weight_update()
    await engine.resume_generation()
    return time.monotonic() - started


class Peer:
    """Carries out commands."""

    def __init__(self, backend: Any, link: WeightLink) -> None:
        self._backend = backend
        self._link = link
        self._load: Load | None = None

    async def do(self, command: dict[str, Any]) -> dict[str, Any]:
        kind = command["do"]
        if kind == "load":
            self._load = Load(self._backend, num_requests=command["requests"], num_tokens=command["tokens"])
            return {}
        if kind == "unload":
            assert self._load is not None
            await self._load.stop()
            return {"series": self._load.series}
        if kind == "last":
            return {"version": self._backend.policy_version, "pause_s": self._link.last_pause_s}
        assert kind == "native", kind
        return await self._native(command)

    async def _native(self, command: dict[str, Any]) -> dict[str, Any]:
        import base64
        import pickle

        # Our own parent's bytes: vLLM's engine takes handles only as pickled tuples.
        update = pickle.loads(base64.b64decode(command["update"]))
        engine = self._backend._engine
        await engine.collective_rpc("use_native_transfer", args=(True,))
        seconds = [await native_update(engine, update, each=command["each"]) for _ in range(command["rounds"])]
        await engine.collective_rpc("use_native_transfer", args=(False,))
        return {"seconds": seconds}


async def main() -> None:
    config = Config.model_validate_json(sys.argv[1])
    name, address, tokenizer_hash = sys.argv[2:5]
    if number := int(os.environ.get("SLIPSTREAM_BENCH_DIE_IN", "0")):
        die_in_transfer(number)
    backend = make_backend(config, name=name)
    hello = make_hello("generator", name=name, tokenizer_hash=tokenizer_hash)
    link = WeightLink(config, hello=hello, backend=backend, on_engine_failed=lambda error: say(failed=str(error)))
    await backend.start(stage_address=link.hub.address)
    await link.hub.wait_ready(60.0)
    say(ready=time.monotonic())
    await link.follow(address)
    shown = backend.policy_version
    peer = Peer(backend, link)
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "")

    from protocol.threads import in_thread

    in_thread("commands", read)
    while True:
        try:
            line = await asyncio.wait_for(lines.get(), 0.005)
        except TimeoutError:
            if backend.policy_version != shown:
                shown = backend.policy_version
                say(version=shown, time=time.monotonic())
            continue
        if not line:
            break
        say(reply=await peer.do(json.loads(line)))
    await link.close()
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main())
