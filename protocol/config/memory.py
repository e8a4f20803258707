"""How much memory a trainer rank and a generator need, from the model's config.json and the settings (without torch).

All figures are bytes. Under ZeRO-3 on N ranks, with bf16 computing and AdamW on float32 masters (Rajbhandari et al.
2020, section 3), a rank holds for each parameter, divided by N: 2 for the weight, 4 for the accumulated gradient, 4 for
the master and 8 for the moments.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.config.learner import LearnerSection
from protocol.config.tree import Config
from protocol.errors import UserError

GIB = 2**30
RUNTIME_BYTES = 1.5 * GIB
"""CUDA context, NCCL and kernels' workspaces; on CPUs the libraries themselves."""
SUB_GROUP_ELEMENTS = 1_000_000_000
"""DeepSpeed steps this many parameters at a time (its sub_group_size)."""
ROOM = 0.92
"""Share of a device's memory that an estimate may take: allocators fragment."""


@dataclass(frozen=True)
class ModelFacts:
    """Dimensions of a dense Llama- or Qwen-like model (gated MLP, grouped-query attention)."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool

    @classmethod
    def of_folder(cls, folder: str | Path) -> ModelFacts:
        """Reads config.json. Raises UserError naming what is missing."""
        path = Path(folder) / "config.json"
        try:
            return cls.of_json(json.loads(path.read_text()))
        except (OSError, ValueError) as problem:
            raise UserError(f"{path} cannot be read as a model's configuration: {problem}") from problem
        except KeyError as missing:
            raise UserError(f"{path} does not say {missing}: memory is estimated for dense models only") from missing

    @classmethod
    def of_json(cls, facts: dict[str, Any]) -> ModelFacts:
        """Raises KeyError naming a missing entry."""
        heads = facts["num_attention_heads"]
        return cls(
            num_layers=facts["num_hidden_layers"],
            hidden_size=facts["hidden_size"],
            intermediate_size=facts["intermediate_size"],
            num_heads=heads,
            num_kv_heads=facts.get("num_key_value_heads") or heads,
            head_dim=facts.get("head_dim") or facts["hidden_size"] // heads,
            vocab_size=facts["vocab_size"],
            tied=bool(facts.get("tie_word_embeddings", False)),
        )

    @property
    def layer_params(self) -> int:
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def num_params(self) -> int:
        """All weights; a tied output head counts once. Biases are left out."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return embeddings + self.num_layers * self.layer_params + self.hidden_size

    def activation_bytes(self, *, width: int) -> int:
        """What one layer keeps of one token for its backward pass, at `width` bytes per number.

        Counted for transformers' eager modules: both norms keep their input in float32, their normalised output and
        its product with the weight; queries, keys and values before and after the rotation, keys and values repeated
        to all heads, the attention's output; gate, up, the activated gate and its product with up.
        """
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norms = 2 * (4 + 2 * width) * self.hidden_size
        attention = width * (2 * (heads + kv) + kv + 2 * heads + heads)
        return norms + attention + 4 * width * self.intermediate_size

    def kv_bytes(self, *, width: int = 2) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * width


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose on one device (`parts`) and on the host of one rank (`host`)."""

    parts: dict[str, float] = field(default_factory=dict)
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def fits(self, device_bytes: float) -> bool:
        """Whether it leaves the allocator its room on a device of this size."""
        return self.total <= ROOM * device_bytes


def trainer_memory(facts: ModelFacts, config: Config) -> MemoryEstimate:
    """The peak of one trainer rank with full micro-batches.

    The larger of two moments counts: the backward pass (activations, and the chunk of logits with the head's gradient)
    and the optimizer step (a float32 copy of the gradients of one sub-group). Sequence parallelism divides activations.
    """
    learner, ranks = config.learner, config.trainer.num_ranks * config.trainer.num_nodes
    width = 4 if config.model.dtype == "float32" else 2
    params = facts.num_params
    share = params / ranks
    on_host = 0.0
    parts = {"weights": width * share, "gradients": 4 * share, "optimizer": 12 * share if width == 2 else 8 * share}
    if learner.zero.offload_optimizer == "cpu":
        on_host += parts.pop("gradients") + parts.pop("optimizer")
    if learner.zero.offload_param == "cpu":
        on_host += parts.pop("weights")
    if ranks > 1 or learner.zero.offload_param == "cpu":
        parts["gathered weights"] = width * min(params, learner.zero.max_live_elements)
    parts["buckets"] = (width + 4) * min(params, learner.zero.reduce_bucket_elements)
    if config.algorithm.kl.where != "off":
        parts["reference model"] = width * params
    if config.weights.snapshot == "device":
        parts["snapshot of the weights"] = width * params
    else:
        on_host += width * params
    backward = _activations(facts, config, width=width) + _head(facts, learner, width=width)
    step = 0.0 if learner.zero.offload_optimizer == "cpu" else 4 * min(share, SUB_GROUP_ELEMENTS)
    parts["activations and logits" if backward >= step else "gradients of a step"] = max(backward, step)
    parts["runtime"] = RUNTIME_BYTES
    return MemoryEstimate(parts=parts, host=on_host)


def _activations(facts: ModelFacts, config: Config, *, width: int) -> float:
    tokens = config.learner.max_tokens_per_micro_batch
    per_layer = facts.activation_bytes(width=width)
    recomputed = 0.0
    if config.model.gradient_checkpointing:
        recomputed = round(facts.num_layers * config.model.checkpoint_share)
    kept = (facts.num_layers - recomputed) * per_layer
    inputs = recomputed * width * facts.hidden_size
    return tokens * (kept + inputs + (per_layer if recomputed else 0))


def _head(facts: ModelFacts, learner: LearnerSection, *, width: int) -> float:
    """Three float32 copies of a chunk's logits and one in the computing type; the head's gradient in both types."""
    logits = learner.logprob_chunk_tokens * facts.vocab_size * (12 + width)
    return logits + (4 + width) * facts.vocab_size * facts.hidden_size


def kv_sequences(facts: ModelFacts, config: Config, *, device_bytes: float) -> int:
    """Sequences of the longest allowed length that a generator's KV cache holds at once (0: the weights do not fit)."""
    generators = config.generators
    lengths = [config.sampling.max_response_tokens, *(stage.max_response_tokens or 0 for stage in config.stages)]
    longest = config.data.max_prompt_tokens + max(lengths)
    size = generators.tensor_parallel_size
    free = generators.gpu_memory_utilization * device_bytes - RUNTIME_BYTES - 2 * facts.num_params / size
    return max(0, int(free // (facts.kv_bytes() / size * longest)))


def with_settings(config: Config, *, share: float, offload: bool, tokens: int) -> Config:
    """The configuration with other memory settings: share of layers recomputed, optimizer offload, tokens per
    micro-batch."""
    model = config.model.model_copy(update={"gradient_checkpointing": share > 0.0, "checkpoint_share": share or 1.0})
    zero = config.learner.zero.model_copy(update={"offload_optimizer": "cpu" if offload else "none"})
    learner = config.learner.model_copy(update={"zero": zero, "max_tokens_per_micro_batch": tokens})
    return config.model_copy(update={"model": model, "learner": learner})


@dataclass(frozen=True)
class Advice:
    """Settings that fit, and their estimate."""

    checkpoint_share: float
    offload_optimizer: bool
    max_tokens_per_micro_batch: int
    estimate: MemoryEstimate

    def overrides(self) -> list[str]:
        """As dotted overrides."""
        share = self.checkpoint_share
        return [
            f"model.gradient_checkpointing={'true' if share else 'false'}",
            *([f"model.checkpoint_share={share:g}"] if share else []),
            f"learner.max_tokens_per_micro_batch={self.max_tokens_per_micro_batch}",
            f"learner.zero.offload_optimizer={'cpu' if self.offload_optimizer else 'none'}",
        ]


def advise(facts: ModelFacts, config: Config, *, device_bytes: float) -> Advice | None:
    """The fastest settings that fit a device, or None when nothing does.

    Recomputing costs up to a third of the work, small micro-batches cost more per token, and offloading costs a trip
    over the bus per step. So the optimizer stays on the device where it can; micro-batches hold as many sequences as
    configured, at least the longest one; and only as many layers as necessary recompute.
    """
    longest = config.data.max_prompt_tokens + config.sampling.max_response_tokens
    least = -(-longest // config.learner.sequence_parallel)
    sizes = [config.learner.max_tokens_per_micro_batch]
    while sizes[-1] // 2 >= least:
        sizes.append(sizes[-1] // 2)
    for offload in (False, True):
        for tokens in sizes:
            for share in (0.0, 0.25, 0.5, 0.75, 1.0):
                estimate = trainer_memory(facts, with_settings(config, share=share, offload=offload, tokens=tokens))
                if estimate.fits(device_bytes):
                    return Advice(share, offload, tokens, estimate)
    return None
