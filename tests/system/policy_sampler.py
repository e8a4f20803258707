"""A small real policy as a generator's back end: an answer is a function of weights, prompt, group and slot alone.

`python -m tests.system.policy_sampler CONFIG NAME` is a generator process whose back end is this one: it computes with
the weights that the publisher brought, and nothing else.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generators import main as generator_main
from generators.backends.base import Sample, SampleRequest
from generators.backends.scripted import ScriptedBackend
from protocol.config import Config
from protocol.logs import setup_logging
from tests.support.stack import load
from tests.support.tiny_model import NUM_BYTES, SPECIAL_TOKENS

NUM_IDS = NUM_BYTES + len(SPECIAL_TOKENS)
"""Ids of the tokenizer; the model's head is wider."""


def load_policy(folder: str) -> Any:
    """The model of a folder in float64, so that both sides of a comparison sample alike."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


@torch.no_grad()
def sample_answer(
    model: Any, prompt: list[int], *, group_id: int, slot: int, temperature: float, max_tokens: int, stop: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of one answer by the Gumbel trick, and their log-probs over the tokenizer's ids."""
    noise = np.random.default_rng([group_id, slot])
    ids, logps = list(prompt), []
    while len(logps) < max_tokens:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1, :NUM_IDS]
        logq = torch.log_softmax(logits / temperature, dim=-1)
        chosen = int((logq + torch.from_numpy(noise.gumbel(size=NUM_IDS))).argmax())
        ids.append(chosen)
        logps.append(float(logq[chosen]))
        if chosen in stop:
            break
    return np.asarray(ids[len(prompt) :], dtype=np.int32), np.asarray(logps, dtype=np.float32)


class PolicyBackend(ScriptedBackend):
    """Takes versions as the scripted back end does, and samples from them."""

    def __init__(self, config: Config, *, name: str) -> None:
        super().__init__(config, name=name)
        self._model = load_policy(config.model.path)

    async def sample(self, request: SampleRequest) -> Sample:
        group_id, slot = request.request_id.split("/")[:2]
        sampling = request.sampling
        token_ids, logp = sample_answer(
            self._model,
            request.prompt_token_ids,
            group_id=int(group_id),
            slot=int(slot),
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop_token_ids),
        )
        stopped = int(token_ids[-1]) in sampling.stop_token_ids
        return Sample(
            token_ids=token_ids,
            logp_behaviour=logp,
            versions=np.full(token_ids.size, self.policy_version, dtype=np.int32),
            finish_reason="stop" if stopped else "length",
            stop_reason=str(token_ids[-1]) if stopped else "",
        )

    async def load_version(self, policy_version: int) -> float:
        tensors = {name: tensor.double() for name, tensor in self._receiver.staged(policy_version)}
        missing = self._model.load_state_dict(tensors, strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
        return await super().load_version(policy_version)


def main() -> int:
    config, name = load(Path(sys.argv[1])), sys.argv[2]
    setup_logging("generator", name)
    torch.set_num_threads(1)
    generator_main.make_backend = lambda config, *, name: PolicyBackend(config, name=name)
    return int(generator_main.run(config, name=name))


if __name__ == "__main__":
    sys.exit(main())
