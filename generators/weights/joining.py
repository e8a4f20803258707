"""How a generator's backend gets its versions: through a weight link, or (a script without receivers) by number."""

import asyncio
import logging

from generators.backends.base import Backend, EngineFailed
from protocol.config import Config
from protocol.logs import event
from protocol.messages import Hello

log = logging.getLogger(__name__)

_READY_S = 60.0


class Joining:
    """Starts the engine together with its receivers, proves one update, then follows the publisher.

    Attributes:
        failure: resolved when a load left the engine unusable.
    """

    def __init__(self, config: Config, *, hello: Hello, backend: Backend) -> None:
        self._config = config
        self._hello = hello
        self._backend = backend
        self._following: asyncio.Task[None] | None = None
        self.failure: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()
        self._link = None
        if backend.worker_info.num_workers > 0:
            from generators.weights.link import WeightLink

            self._link = WeightLink(config, hello=hello, backend=backend, on_engine_failed=self._fail)

    def _fail(self, error: EngineFailed) -> None:
        if not self.failure.done():
            self.failure.set_result(error)

    async def start_engine(self) -> None:
        """Brings the backend up; a real one then loads its own weights through the update path (B77).

        Raises:
            EngineFailed: the engine, its receivers or the trial update do not work.
        """
        link = self._link
        await self._backend.start(stage_address=link.hub.address if link is not None else None)
        if link is None:
            return
        try:
            await link.hub.wait_ready(_READY_S)
        except TimeoutError:
            raise EngineFailed(f"the engine's weight receivers did not report within {_READY_S:g} s") from None
        if self._config.generators.backend == "vllm" and self._config.generators.load_format != "dummy":
            await self._try_update()

    async def _try_update(self) -> None:
        from generators.weights.trial import trial_offer

        assert self._link is not None
        weights = self._config.weights
        offer = await asyncio.to_thread(
            trial_offer, self._config.model.path, bucket_bytes=weights.bucket_mb << 20, deadline_s=weights.deadline_s
        )
        if offer is not None:
            await self._link.try_update(offer)
            event(log, logging.INFO, "trial weight update passed", tensors=len(offer.tensors))

    async def follow(self, weights_address: str | None, *, published_version: int) -> None:
        """Goes where the coordinator says weights come from; never blocks on a publisher that is not there."""
        if self._link is None:
            if published_version > self._backend.policy_version:
                await self._backend.load_version(published_version)
        elif self._following is None or self._following.done():
            self._following = asyncio.ensure_future(self._link.follow(weights_address))

    def metrics(self) -> dict[str, float]:
        """Updates so far and what the last one cost."""
        if self._link is None:
            return {}
        return {
            "generator/weight_updates": float(self._link.num_updates),
            "generator/update_pause_s": self._link.last_pause_s,
            "generator/update_s": self._link.last_update_s,
        }

    async def close(self) -> None:
        """Leaves the weight group."""
        if self._following is not None:
            self._following.cancel()
        if self._link is not None:
            await self._link.close()
