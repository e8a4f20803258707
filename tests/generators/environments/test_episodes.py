"""Answers of several turns: exact masks and versions, interruption anywhere, faults that are never rewards."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from generators.backends.base import RequestFailed, Sample, SampleRequest
from generators.environments import Episode, Observation
from generators.episodes import EpisodePlayer
from generators.slots import Answer, Slot, hand_back_of, slots_of
from generators.text import Decoder
from protocol.config.services import EnvironmentSection
from protocol.messages import Lease
from tests.generators.support import make_lease
from tests.support.tiny_model import build_tiny_tokenizer

STOP = 258


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tiny_tokenizer(folder)
    return Decoder(str(folder))


class Policy:
    """Samples what it is told: one text per request, then the stop token; its version grows with each request."""

    def __init__(self, decoder: Decoder, *texts: str) -> None:
        self._decoder = decoder
        self.texts = list(texts)
        self.requests: list[SampleRequest] = []
        self.policy_version = 0
        self.aborted: list[str] = []

    async def sample(self, request: SampleRequest) -> Sample:
        self.requests.append(request)
        self.policy_version += 1
        ids = [*self._decoder.observation_ids(self.texts.pop(0), role=None), STOP]
        reason = "stop"
        if len(ids) > request.sampling.max_tokens:
            ids, reason = ids[: request.sampling.max_tokens], "length"
        size = len(ids)
        return Sample(
            token_ids=np.asarray(ids, np.int32),
            logp_behaviour=np.full(size, -0.5, np.float32),
            versions=np.full(size, self.policy_version, np.int32),
            finish_reason=reason,  # type: ignore[arg-type]
            stop_reason=str(STOP) if reason == "stop" else "",
        )

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


class Says:
    """An environment with an answer to every turn; keeps the episodes that it was shown."""

    def __init__(self, respond: Callable[[Episode], Any]) -> None:
        self.episodes: list[Episode] = []
        self._respond = respond

    async def respond(self, episode: Episode) -> Observation | None:
        self.episodes.append(episode)
        said = self._respond(episode)
        return await said if asyncio.iscoroutine(said) else said

    async def close(self) -> None:
        return None


def player(policy: Policy, environment: Says | None, decoder: Decoder, **settings: Any) -> EpisodePlayer:
    section = EnvironmentSection(name="test", **settings)
    return EpisodePlayer(section, backend=policy, environment=environment, decoder=decoder)  # type: ignore[arg-type]


def a_slot(**sampling: Any) -> Slot:
    return Slot(lease=make_lease(1, slots=1, **{"max_tokens": 64, **sampling}), slot=0)


def ids_of(decoder: Decoder, text: str) -> list[int]:
    return decoder.observation_ids(text, role=None)


def twice(episode: Episode) -> Observation | None:
    return Observation(text="[ok]", role=None) if len(episode.turns) == 1 else None


def test_masks_and_versions_are_exact_over_two_turns(decoder: Decoder) -> None:
    policy, environment, slot = Policy(decoder, "ab", "cd"), Says(twice), a_slot()
    asyncio.run(player(policy, environment, decoder).play(slot))
    answer = slot.answer
    assert answer.token_ids.tolist() == [
        *ids_of(decoder, "ab"),
        STOP,
        *ids_of(decoder, "[ok]"),
        *ids_of(decoder, "cd"),
        STOP,
    ]
    assert answer.loss_mask.tolist() == [1, 1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert answer.versions.tolist() == [1, 1, 1, 1, 1, 1, 1, 2, 2, 2]
    assert answer.logp_behaviour.tolist() == [-0.5] * 3 + [0.0] * 4 + [-0.5] * 3
    assert (answer.finish_reason, answer.stop_reason) == ("stop", str(STOP))
    second = policy.requests[1]
    assert second.prompt_token_ids == [
        *slot.lease.prompt_token_ids,
        *ids_of(decoder, "ab"),
        STOP,
        *ids_of(decoder, "[ok]"),
    ]
    assert second.sampling.max_tokens == 64 - 7
    assert len({request.request_id for request in policy.requests}) == 2
    assert [(turn.by, turn.text) for turn in environment.episodes[1].turns] == [
        ("policy", "ab"),
        ("environment", "[ok]"),
        ("policy", "cd"),
    ]


def test_a_message_goes_through_the_chat_template(decoder: Decoder) -> None:
    ids = decoder.observation_ids("hello", role="user")
    text = decoder.raw_text(ids)
    assert "hello" in text and text.count("hello") == 1
    whole = decoder._tokenizer.apply_chat_template(
        [{"role": "user", "content": "-"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "hello"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert whole.endswith(text)


def test_an_observation_that_does_not_fit_ends_the_answer_as_too_long(decoder: Decoder) -> None:
    policy, slot = Policy(decoder, "ab"), a_slot(max_tokens=7)
    asyncio.run(player(policy, Says(twice), decoder).play(slot))
    assert slot.answer.token_ids.tolist() == [*ids_of(decoder, "ab"), STOP]
    assert slot.answer.finish_reason == "length"


def test_the_number_of_turns_is_bounded(decoder: Decoder) -> None:
    policy, slot = Policy(decoder, "a", "b", "c"), a_slot()
    endless = Says(lambda episode: Observation(text="+", role=None))
    asyncio.run(player(policy, endless, decoder, max_turns=3).play(slot))
    assert decoder.text(slot.answer.token_ids) == "a+b+c" and len(endless.episodes) == 2


def test_an_interrupted_environment_hands_the_turn_back_and_another_goes_on(decoder: Decoder) -> None:
    async def forever(episode: Episode) -> None:
        await asyncio.Event().wait()

    async def scene() -> Slot:
        slot, environment = a_slot(), Says(forever)
        first = player(Policy(decoder, "ab"), environment, decoder)
        playing = asyncio.ensure_future(first.play(slot))
        while not environment.episodes:
            await asyncio.sleep(0)
        await first.interrupt(slot)
        await playing
        return slot

    slot = asyncio.run(scene())
    assert slot.answer.finish_reason == "aborted" and slot.answer.num_tokens == 3
    body, arrays = hand_back_of([slot], reason="draining")
    lease: Lease = make_lease(1, slots=1, attempt=2, max_tokens=64)
    lease = type(lease)(**{f: getattr(lease, f) for f in lease.__struct_fields__} | {"partial": body.partial})
    again = slots_of(lease, arrays)[0]
    policy, environment = Policy(decoder, "cd"), Says(twice)
    asyncio.run(player(policy, environment, decoder).play(again))
    assert decoder.text(again.answer.token_ids) == "ab[ok]cd"
    assert again.answer.loss_mask.tolist() == [1, 1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert len(policy.requests) == 1


def broken(episode: Episode) -> Observation | None:
    raise ZeroDivisionError("oops")


async def hanging(episode: Episode) -> Observation | None:
    await asyncio.Event().wait()
    return None


@pytest.mark.parametrize(("fault", "message"), [(broken, "oops"), (hanging, "did not respond within")])
def test_a_fault_of_the_environment_fails_the_request_with_its_tokens_kept(
    decoder: Decoder, fault: Callable[[Episode], Any], message: str
) -> None:
    slot = a_slot()
    with pytest.raises(RequestFailed, match=message):
        asyncio.run(player(Policy(decoder, "ab"), Says(fault), decoder, deadline_s=0.1).play(slot))
    assert slot.answer.token_ids.tolist() == [*ids_of(decoder, "ab"), STOP]


def test_without_an_environment_an_answer_is_one_turn(decoder: Decoder) -> None:
    policy, slot = Policy(decoder, "ab", "never"), a_slot()
    asyncio.run(player(policy, None, decoder).play(slot))
    assert decoder.text(slot.answer.token_ids) == "ab" and len(policy.requests) == 1


def test_turns_of_an_answer() -> None:
    assert Answer.empty().turns() == []


def test_environments_are_found_by_name_or_refused_in_one_line(tmp_path: Path) -> None:
    from generators.environments import load_environment
    from protocol.errors import UserError

    assert isinstance(load_environment(f"{__name__}:Says", {"respond": 1}), Says)  # type: ignore[dict-item]
    for name, options in (("absent", {}), ("no.such:Thing", {}), (f"{__name__}:Nothing", {}), (f"{__name__}:Says", {})):
        with pytest.raises(UserError, match=r"generators\.environment\.name"):
            load_environment(name, options)
