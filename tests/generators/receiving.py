"""A weight receiver in a process of its own, behind a real link: what a generator is to the publisher, minus tokens.

Run as `python -m tests.generators.receiving CONFIG_JSON NAME PUBLISHER_ADDRESS TOKENIZER_HASH`; prints a line per
version in use. With SLIPSTREAM_TEST_SIGNAL=N it sends itself signal N in the middle of the first transfer.
"""

import asyncio
import os
import sys
from typing import Any

from generators.backends import make_backend
from generators.weights.link import WeightLink
from generators.weights.stage import Stage
from protocol.config import Config
from protocol.sockets import make_hello


def sabotage() -> None:
    """Sends this process a signal when it is about to receive its second bucket."""
    number = int(os.environ.get("SLIPSTREAM_TEST_SIGNAL", "0"))
    if not number:
        return
    buffer = Stage.buffer

    def deadly(self: Stage, bucket: int) -> Any:
        if bucket == 1:
            Stage.buffer = buffer  # type: ignore[method-assign]
            os.kill(os.getpid(), number)
        return buffer(self, bucket)

    Stage.buffer = deadly  # type: ignore[method-assign]


async def main() -> None:
    config = Config.model_validate_json(sys.argv[1])
    name, address, tokenizer_hash = sys.argv[2:5]
    sabotage()
    backend = make_backend(config, name=name)
    hello = make_hello("generator", name=name, tokenizer_hash=tokenizer_hash)
    link = WeightLink(config, hello=hello, backend=backend, on_engine_failed=lambda error: print(error, flush=True))
    await backend.start(stage_address=link.hub.address)
    await link.hub.wait_ready(30.0)
    await link.follow(address)
    shown = -1
    while True:
        if backend.policy_version != shown:
            shown = backend.policy_version
            print(f"version {shown}", flush=True)
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    asyncio.run(main())
