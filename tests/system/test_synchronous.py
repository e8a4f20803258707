"""η = 0: the processes of a run do what a plain sequential loop over the same parts does, to rounding."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from generators.text import Decoder
from learner.coordinator.order import pass_order
from learner.data.dataset import load_prompts
from learner.data.tokenization import PromptTokenizer
from learner.trainer.batch import TrainBatch, TrajectoryArrays
from protocol.config import Config
from protocol.messages import BatchItem, BatchPlan
from tests.learner.trainer.reference import ReferenceLearner
from tests.support.ledger_queries import SAMPLED_AGES
from tests.support.stack import Stack, running_stack, write_config
from tests.support.wait import wait_until
from tests.system import parity_scorer
from tests.system.policy_sampler import load_policy, sample_answer

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_UPDATES = 6
ROLES = ("coordinator", "rewardd", "trainer", "generator")
DEADLINE_S = 240.0


class SequentialLoop:
    """Sample a batch, score it, train on it, load the new weights: one after the other, in this process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.learner = ReferenceLearner(config)
        self.lengths: dict[tuple[int, int], int] = {}
        tokenizer = PromptTokenizer(config.model.path)
        self._stop = list(tokenizer.facts(config.model.path).stop_token_ids)
        self._decoder = Decoder(config.model.path)
        self._policy = load_policy(config.model.path)
        prompts = load_prompts(
            config.data.train_files, tokenizer=tokenizer, max_prompt_tokens=config.data.max_prompt_tokens
        ).prompts
        order = pass_order(len(prompts), seed=config.run.seed, pass_number=0, shuffle=config.data.shuffle)
        self._prompts = [prompts[i].token_ids.tolist() for i in order]
        self._num_groups = 0

    def update(self, version: int) -> float:
        """One update from `version`; returns its loss, as the trainer reports it (mean over mini-batches)."""
        parts = self.config.learner.mini_batches
        losses = self.learner.train_batch(self._sample_batch(version), num_mini_batches=parts)
        self._policy.load_state_dict({name: w.float().double() for name, w in self.learner.weights().items()}, False)
        return sum(losses) / parts

    def _sample_batch(self, version: int) -> TrainBatch:
        items: list[BatchItem] = []
        arrays: dict[int, TrajectoryArrays] = {}
        for _ in range(self.config.learner.groups_per_batch):
            prompt = self._prompts[self._num_groups]
            self._num_groups += 1
            for slot in range(self.config.learner.group_size):
                token_ids, logp = sample_answer(
                    self._policy,
                    prompt,
                    group_id=self._num_groups,
                    slot=slot,
                    temperature=self.config.sampling.temperature,
                    max_tokens=self.config.sampling.max_response_tokens,
                    stop=self._stop,
                )
                right = parity_scorer.is_right(self._decoder.text(token_ids))
                self.lengths[self._num_groups, slot] = token_ids.size
                arrays[len(items)] = TrajectoryArrays(
                    np.asarray([*prompt, *token_ids], np.int32),
                    logp,
                    np.full(token_ids.size, version, np.int32),
                    np.ones(token_ids.size, np.uint8),
                )
                items.append(self._item(slot, prompt, token_ids, right=right, version=version))
        plan = BatchPlan(
            batch_id=version + 1,
            policy_version=version,
            stage=0,
            items=items,
            micro_batches=[[list(range(len(items)))]],
            fill_fraction=1.0,
            oldest_age_s=0.0,
        )
        return TrainBatch(plan=plan, arrays=arrays)

    def _item(self, slot: int, prompt: list[int], token_ids: np.ndarray, *, right: bool, version: int) -> BatchItem:
        return BatchItem(
            group_id=self._num_groups,
            slot=slot,
            prompt_id="",
            data_source="sums",
            num_prompt_tokens=len(prompt),
            num_response_tokens=token_ids.size,
            score=float(right),
            verdict="correct" if right else "wrong",
            finish_reason="length",
            min_version=version,
            max_version=version,
            temperature=self.config.sampling.temperature,
            stage=0,
        )


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """A run with staleness bound 0: nothing is started yet."""
    config_path = write_config(
        tmp_path,
        run__max_updates=NUM_UPDATES,
        algorithm__max_staleness=0,
        sampling__max_response_tokens=12,
        learner__mini_batches=2,
        learner__optim={"lr": 1e-3, "eps": 1e-5},
        learner__checkpoint={"every_updates": 2, "min_free_gb": 0.0},
        trainer__device="cpu",
        trainer__threads_per_rank=1,
        trainer__batch_wait_s=0.5,
        generators__engine_args={"receive": True},
        rewardd__scorers={"sums": parity_scorer.NAME},
    )
    with running_stack(config_path) as stack:
        yield stack


class Processes:
    """Coordinator, reward daemon with its scorer, DeepSpeed trainer, generator with the policy sampler."""

    def __init__(self, stack: Stack, site: Path) -> None:
        self._stack = stack
        self._python_path = os.pathsep.join((str(site), os.environ["PYTHONPATH"]))
        parity_scorer.install(site)
        for role in ROLES:
            self.start(role)

    def start(self, role: str) -> None:
        if role == "generator":
            command = [sys.executable, "-m", "tests.system.policy_sampler", str(self._stack.config_path), role]
            self._stack.spawn(role, command)
        else:
            self._stack.start(role, PYTHONPATH=self._python_path)

    def wait_for_end(self) -> None:
        for name, process in self._stack.processes.items():
            assert process.wait(DEADLINE_S) == 0, self._stack.log(name)[-5000:]


def assert_equals_the_loop(stack: Stack) -> None:
    """Answers, losses and weights of a finished run are those of the sequential loop."""
    loop = SequentialLoop(stack.config)
    expected = [loop.update(version) for version in range(NUM_UPDATES)]
    lengths = stack.query("SELECT group_id, slot, SUM(num_tokens) FROM sampled_tokens GROUP BY group_id, slot")
    assert {(group, slot): num for group, slot, num in lengths} == loop.lengths
    assert {age for _, age, _ in stack.query(SAMPLED_AGES)} == {0}
    records = [json.loads(line) for line in (stack.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {record["batch_id"] for record in records} == set(range(1, NUM_UPDATES + 1))
    for record in records:  # those of a replay too
        assert record["actor/loss"] == pytest.approx(expected[record["batch_id"] - 1], abs=2e-5), record["batch_id"]
    weights = load_file(stack.run_dir / "export" / "model.safetensors")
    reference = loop.learner.weights()
    assert weights.keys() == reference.keys()
    for name, tensor in weights.items():
        assert float((tensor.double() - reference[name]).abs().max()) < 2e-5 * NUM_UPDATES, name
    first = load_file(f"{stack.config.model.path}/model.safetensors")
    assert max(float((weights[name] - first[name]).abs().max()) for name in weights) > 1e-3  # it did learn


def test_losses_and_weights_equal_a_sequential_loop(stack: Stack, tmp_path: Path) -> None:
    Processes(stack, tmp_path / "site").wait_for_end()
    assert_equals_the_loop(stack)


def test_b43_b48_kills_change_neither_answers_nor_losses_nor_weights(stack: Stack, tmp_path: Path) -> None:
    processes = Processes(stack, tmp_path / "site")
    for num_trained, role in enumerate(("generator", "trainer", "coordinator", "rewardd"), start=1):
        wait_until(lambda n=num_trained: stack.num_trained() >= n, deadline_s=DEADLINE_S, what=f"{num_trained} batches")
        stack.kill(role)
        processes.start(role)
    processes.wait_for_end()
    assert_equals_the_loop(stack)
