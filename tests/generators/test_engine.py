"""A real vLLM engine: exact samples, updates in flight, caches. One engine serves the whole module."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from generators.backends.base import RequestFailed, SampleRequest
from learner.weights.snapshot import Snapshot
from tests.generators.engine import NUM_IDS, TEMPERATURE, Engine, log_ratio, requests
from tests.generators.support import sampling_params
from tests.support.tiny_model import VOCAB_SIZE, build_tiny_model
from tests.support.wait import wait_until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two policies; the first one's folder ships generation defaults that would spoil sampling (B18)."""
    folders = [build_tiny_model(tmp_path_factory.mktemp(f"policy{seed}"), seed=seed) for seed in (0, 1)]
    defaults = {"top_k": 1, "temperature": 0.01, "repetition_penalty": 3.0, "eos_token_id": 258, "max_new_tokens": 2}
    (folders[0] / "generation_config.json").write_text(json.dumps(defaults))
    return folders


@pytest.fixture(scope="module")
def engine(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    running = Engine(models[0], tmp_path_factory.mktemp("run"))
    yield running
    running.close()


@pytest.fixture(autouse=True)
def first_policy(engine: Engine, models: list[Path], request: pytest.FixtureRequest) -> None:
    """Every test starts from policy 0, under a new version number once it was replaced."""
    if engine.backend.policy_version > 0:
        engine.publish(models[0], engine.backend.policy_version + 1)


def test_b66_log_probs_are_those_of_the_sampling_distribution(engine: Engine) -> None:
    asked = requests("parity", 4)
    for request, sample in zip(asked, engine.sample(asked), strict=True):
        assert sample.num_tokens == 80 and sample.finish_reason == "length" and sample.stop_reason == ""
        assert (sample.versions == engine.backend.policy_version).all()
        assert log_ratio(engine.folder, request, sample).max() < 1e-3


def test_b18_folder_defaults_are_ignored(engine: Engine) -> None:
    samples = engine.sample(requests("group", 4, prompt=list(range(60, 90))))
    assert len({sample.token_ids.tobytes() for sample in samples}) == 4
    assert all(sample.num_tokens == 80 for sample in samples)


def test_b19_ids_beyond_the_tokenizer_are_never_sampled(engine: Engine) -> None:
    hot = sampling_params(temperature=2.0, max_tokens=200, stop_token_ids=())
    asked = requests("hot", 8, sampling=hot)
    samples = engine.sample(asked)
    ids = np.concatenate([sample.token_ids for sample in samples])
    assert ids.size == 1600 and ids.max() < NUM_IDS < VOCAB_SIZE
    assert log_ratio(engine.folder, asked[0], samples[0]).max() < 1e-3


def test_b12_refused_request_fails_alone_and_leaves_nothing_behind(engine: Engine) -> None:
    bad = sampling_params(temperature=5.0, stop_token_ids=())  # above what vLLM takes
    with pytest.raises(RequestFailed, match="temperature"):
        engine.sample(requests("bad", 1, sampling=bad))
    assert engine.backend.progress() == {}
    assert engine.sample(requests("good", 1))[0].num_tokens == 80


def test_b69_stop_token_is_part_of_the_answer(engine: Engine) -> None:
    stops = tuple(range(100, 200))
    sampling = sampling_params(temperature=TEMPERATURE, max_tokens=200, stop_token_ids=stops)
    asked = requests("stop", 4, sampling=sampling)
    for request, sample in zip(asked, engine.sample(asked), strict=True):
        assert sample.finish_reason == "stop"
        assert int(sample.token_ids[-1]) in stops and sample.stop_reason == str(sample.token_ids[-1])
        assert not set(sample.token_ids[:-1].tolist()) & set(stops)
        assert log_ratio(engine.folder, request, sample).max() < 1e-3


def test_aborted_request_returns_its_tokens_and_can_be_continued(engine: Engine) -> None:
    request = requests("abort", 1, sampling=sampling_params(max_tokens=200, stop_token_ids=()))[0]
    (future,) = engine.submit([request])
    wait_until(lambda: engine.backend.progress().get("abort/0", 0) > 5, what="tokens")
    assert 0.0 < engine.backend.metrics()["generator/kv_demand"] < 1.0
    engine.wait(engine.backend.abort("abort/0"))
    first = future.result(20.0)
    assert first.finish_reason == "aborted" and 5 < first.num_tokens < 200
    assert log_ratio(engine.folder, request, first).max() < 1e-3
    rest = SampleRequest(
        request_id="abort/1",
        prompt_token_ids=request.prompt_token_ids + first.token_ids.tolist(),
        sampling=sampling_params(max_tokens=20, stop_token_ids=()),
    )
    assert log_ratio(engine.folder, rest, engine.sample([rest])[0]).max() < 1e-3


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_b50_b52_update_in_flight(engine: Engine, models: list[Path], kv_on_update: Any) -> None:
    """Tokens before the update are policy 0's, and with recomputed caches those after it are policy 1's, exactly."""
    engine.backend.kv_on_update = kv_on_update
    before = engine.backend.policy_version
    asked = requests(f"flight-{kv_on_update}", 6, sampling=sampling_params(max_tokens=200, stop_token_ids=()))
    futures = engine.submit(asked)
    wait_until(lambda: min(engine.backend.progress().values(), default=0) > 20, what="tokens")
    engine.publish(models[1], before + 1)
    crossed = 0
    for request, sample in zip(asked, [future.result(60.0) for future in futures], strict=True):
        assert sample.num_tokens == 200 and (np.diff(sample.versions) >= 0).all()
        assert set(sample.versions.tolist()) <= {before, before + 1}
        crossed += len(set(sample.versions.tolist())) == 2
        old, new = sample.versions == before, sample.versions == before + 1
        assert log_ratio(models[0], request, sample)[old].max() < 1e-3
        if kv_on_update == "recompute":
            assert log_ratio(models[1], request, sample)[new].max() < 1e-3
    assert crossed == 6


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_b47_nothing_cached_under_the_old_weights_is_reused(
    engine: Engine, models: list[Path], kv_on_update: Any
) -> None:
    engine.backend.kv_on_update = kv_on_update
    prompt = [*range(30, 230)]
    engine.sample(requests(f"warm-{kv_on_update}", 2, prompt=prompt))
    engine.publish(models[1], engine.backend.policy_version + 1)
    asked = requests(f"cold-{kv_on_update}", 2, prompt=prompt)
    for request, sample in zip(asked, engine.sample(asked), strict=True):
        assert log_ratio(models[1], request, sample).max() < 1e-3


def test_b16_b45_refused_update_leaves_the_old_version_serving(engine: Engine, models: list[Path]) -> None:
    before = engine.backend.policy_version
    tensors = [(name, tensor[:1].clone()) for name, tensor in load_file(models[1] / "model.safetensors").items()]
    engine.publisher.submit(Snapshot(policy_version=before + 1, tensors=tensors))
    assert engine.publisher.wait_idle(60.0)
    assert "has shape" in engine.publisher.status()["given_up"]["g0"]
    asked = requests("after", 1)
    sample = engine.sample(asked)[0]
    assert (sample.versions == before).all() and log_ratio(models[0], asked[0], sample).max() < 1e-3
    engine.publish(models[1], before + 2)
    asked = requests("again", 1)
    assert log_ratio(models[1], asked[0], engine.sample(asked)[0]).max() < 1e-3
