"""Plays one answer: the policy's turns on the engine, an environment's turns between them."""

import asyncio
import logging
from dataclasses import replace

from generators.backends.base import Backend, RequestFailed
from generators.environments.base import Environment, Episode, Observation, Turn
from generators.slots import Slot
from generators.text import Decoder
from protocol.config.services import EnvironmentSection
from protocol.logs import event
from protocol.messages import Lease

log = logging.getLogger(__name__)


class EpisodePlayer:
    """Samples answers, with an environment or without.

    Args:
        environment: None: an answer is one turn of the policy.
    """

    def __init__(
        self, settings: EnvironmentSection, *, backend: Backend, environment: Environment | None, decoder: Decoder
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._environment = environment
        self._decoder = decoder
        self._responding: dict[str, asyncio.Task[Observation | None]] = {}
        self._interrupted: set[str] = set()

    async def play(self, slot: Slot) -> None:
        """Extends `slot.answer` until it is finished (stop or length) or was interrupted (aborted).

        Raises:
            EngineFailed: the engine died.
            RequestFailed: this answer failed; `slot.answer` holds its exact tokens up to there.
        """
        try:
            at_end_of_turn = self._is_end_of_turn(slot)
            while not slot.is_full:
                if not at_end_of_turn:
                    await self._sample(slot)
                    if slot.answer.finish_reason != "stop":
                        return
                at_end_of_turn = False
                if not await self._observe(slot):
                    return
        finally:
            self._interrupted.discard(slot.key)

    async def interrupt(self, slot: Slot) -> None:
        """Ends the answer where it is; `play` returns with finish_reason "aborted"."""
        self._interrupted.add(slot.key)
        step = self._responding.get(slot.key)
        if step is not None:
            step.cancel()
        await self._backend.abort(slot.request_id)

    async def _sample(self, slot: Slot) -> None:
        if slot.key in self._interrupted:
            slot.answer = replace(slot.answer, finish_reason="aborted")
            return
        sample = await self._backend.sample(slot.next_request())
        problem = self._decoder.problem_of(sample.token_ids) if sample.finish_reason != "aborted" else ""
        if problem:
            raise RequestFailed(problem)
        slot.answer = slot.answer.sampled(sample)

    async def _observe(self, slot: Slot) -> bool:
        """Lets the environment speak; False when the answer is finished."""
        turns = slot.answer.turns()
        if self._environment is None or sum(by_policy for by_policy, _ in turns) >= self._settings.max_turns:
            return False
        observation = await self._respond(self._environment, slot, self._episode(slot.lease, slot))
        if slot.answer.finish_reason == "aborted" or observation is None:
            return False
        token_ids = self._decoder.observation_ids(observation.text, role=observation.role)
        if slot.answer.num_tokens + len(token_ids) >= slot.lease.sampling.max_tokens:
            slot.answer = replace(slot.answer, finish_reason="length", stop_reason="")
            return False
        slot.answer = slot.answer.observed(token_ids, policy_version=self._backend.policy_version)
        return True

    async def _respond(self, environment: Environment, slot: Slot, episode: Episode) -> Observation | None:
        step = asyncio.ensure_future(environment.respond(episode))
        self._responding[slot.key] = step
        try:
            return await asyncio.wait_for(step, self._settings.deadline_s)
        except TimeoutError as error:
            raise RequestFailed(
                f"the environment did not respond within {self._settings.deadline_s:.0f} s"
                " (generators.environment.deadline_s)"
            ) from error
        except asyncio.CancelledError:
            if slot.key not in self._interrupted:
                raise
            slot.answer = replace(slot.answer, finish_reason="aborted")
            return None
        except Exception as error:
            event(log, logging.ERROR, "environment failed", slot=slot.key, reason=repr(error))
            raise RequestFailed(f"the environment failed: {error!r}") from error
        finally:
            del self._responding[slot.key]

    def _episode(self, lease: Lease, slot: Slot) -> Episode:
        return Episode(
            prompt_id=lease.prompt_id,
            prompt=self._decoder.raw_text(lease.prompt_token_ids),
            turns=tuple(
                Turn(by="policy" if by_policy else "environment", text=self._decoder.text(ids))
                for by_policy, ids in slot.answer.turns()
            ),
            stop_reason=slot.answer.stop_reason,
        )

    def _is_end_of_turn(self, slot: Slot) -> bool:
        """Whether an earlier attempt was interrupted between the policy's turn and the environment's."""
        answer, sampling = slot.answer, slot.lease.sampling
        if self._environment is None or not answer.num_tokens or not answer.loss_mask[-1]:
            return False
        if int(answer.token_ids[-1]) in sampling.stop_token_ids:
            return True
        text = self._decoder.text(answer.turns()[-1][1])
        return any(text.endswith(stop) for stop in sampling.stop)
