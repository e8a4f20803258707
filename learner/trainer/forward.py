"""The policy as the learner runs it: packed tokens in, log-probs and entropies of the response tokens out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from learner.trainer import attention
from learner.trainer.batch import MicroBatch
from learner.trainer.logprob import LogProbHead
from learner.trainer.ranks import OwnRows, Ranks, own_rows

HF_PREFIX = "hf."
ALONE = Ranks(rank=0, num_ranks=1)


class PolicyModel(nn.Module):
    """A causal language model of transformers whose head returns log-probs in chunks.

    Parameters are named as in the Hugging Face checkpoint with the prefix ``hf.``; a tied head counts once, under the
    embedding's name.
    """

    def __init__(self, hf: Any, *, chunk_tokens: int, ranks: Ranks) -> None:
        super().__init__()
        self.hf = hf
        self.head = LogProbHead(hf.get_output_embeddings().weight, chunk_tokens=chunk_tokens)
        self._ranks = ranks

    def forward(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """``(logp_T, entropy_T)`` of the response tokens at their sampling temperatures, float32, nats."""
        hidden_tD, rows = predicting_states(self.hf.base_model, micro_batch, ranks=self._ranks)
        outputs = self.head(hidden_tD, micro_batch.token_T[rows.place_t], micro_batch.temperature_T[rows.place_t])
        logp_T, entropy_T = rows.join(outputs, self._ranks)
        return logp_T, entropy_T


class CriticModel(nn.Module):
    """The body of a language model and a head that gives one value per response token: of the state before it.

    The head starts at 0, so the first values are exactly 0 whatever the body says.
    """

    def __init__(self, body: Any, *, ranks: Ranks) -> None:
        super().__init__()
        self.body = body
        self.head = ValueHead(body.config.get_text_config().hidden_size, dtype=next(body.parameters()).dtype)
        self._ranks = ranks

    def forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        """``value_T`` float32, in units of reward."""
        hidden_tD, rows = predicting_states(self.body, micro_batch, ranks=self._ranks)
        return rows.join((self.head(hidden_tD),), self._ranks)[0]


class ValueHead(nn.Module):
    """``hidden_TD -> value_T`` in float32."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden_TD.float(), self.weight.float())[:, 0]


def predicting_states(body: Any, micro_batch: MicroBatch, *, ranks: Ranks) -> tuple[torch.Tensor, OwnRows]:
    """Hidden states ``[t, D]`` that predict the response tokens of this rank's run, and which those are."""
    layout = micro_batch.layout
    kernel_arguments: dict[str, Any] = {"packed_layout": layout}
    if layout.kernel == "flash":
        kernel_arguments = {
            "cu_seq_lens_q": layout.cu_seqlens,
            "cu_seq_lens_k": layout.cu_seqlens,
            "max_length_q": layout.max_length,
            "max_length_k": layout.max_length,
        }
    own = ranks.own_tokens(micro_batch.num_tokens)
    hidden_1nD = body(
        input_ids=micro_batch.input_ids[:, own],
        position_ids=micro_batch.position_ids[:, own],
        use_cache=False,
        **kernel_arguments,
    ).last_hidden_state
    rows = own_rows(micro_batch.predict_T, num_tokens=micro_batch.num_tokens, ranks=ranks)
    return hidden_1nD[0][rows.row_t], rows


def hf_name(parameter_name: str) -> str:
    """Name in the Hugging Face checkpoint of a parameter of PolicyModel."""
    assert parameter_name.startswith(HF_PREFIX), parameter_name
    return parameter_name.removeprefix(HF_PREFIX)


def load_policy(
    path: str | Path,
    *,
    dtype: torch.dtype,
    kernel: str,
    chunk_tokens: int,
    gradient_checkpointing: bool,
    checkpoint_share: float = 1.0,
    liger: bool = False,
    ranks: Ranks = ALONE,
) -> PolicyModel:
    """Loads a model folder in ``dtype`` on the CPU.

    With ``gradient_checkpointing`` the first ``checkpoint_share`` of the layers recompute their activations. Raises
    ValueError for a missing folder, and for models whose logits are not a plain product with the head.
    """
    from transformers import AutoModelForCausalLM

    hf = _load(AutoModelForCausalLM, path, dtype=dtype, kernel=kernel, ranks=ranks)
    _require_plain_head(hf, path=str(path))
    if liger:
        _use_liger(hf)
    if gradient_checkpointing:
        _checkpoint_layers(hf, share=checkpoint_share)
    return PolicyModel(hf, chunk_tokens=chunk_tokens, ranks=ranks)


def load_critic(
    path: str | Path,
    *,
    dtype: torch.dtype,
    kernel: str,
    gradient_checkpointing: bool,
    checkpoint_share: float,
    liger: bool,
    ranks: Ranks,
) -> CriticModel:
    """Loads the body of a model folder in ``dtype`` on the CPU, with a new value head."""
    from transformers import AutoModel

    body = _load(AutoModel, path, dtype=dtype, kernel=kernel, ranks=ranks)
    if liger:
        _use_liger(body)
    if gradient_checkpointing:
        _checkpoint_layers(body, share=checkpoint_share)
    return CriticModel(body, ranks=ranks)


def _load(factory: Any, path: str | Path, *, dtype: torch.dtype, kernel: str, ranks: Ranks) -> Any:
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"model.path {path} holds no config.json: give the folder of a Hugging Face model")
    implementation = attention.register(kernel, ranks=ranks)
    model = factory.from_pretrained(str(path), dtype=dtype, attn_implementation=implementation)
    if model.config.get_text_config().num_attention_heads % ranks.sequence_size:
        raise ValueError(
            f"{path} has {model.config.get_text_config().num_attention_heads} attention heads, which "
            f"learner.sequence_parallel = {ranks.sequence_size} does not divide"
        )
    return model.train()


def _checkpoint_layers(hf: Any, *, share: float) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [module for module in hf.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers[round(share * len(layers)) :]:
        layer.gradient_checkpointing = False


def _use_liger(hf: Any) -> None:
    """Liger's kernels for norms, activations and rotary embedding; the head stays ours, which gives log-probs."""
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ValueError(
            f"learner.liger needs the package liger-kernel ({error}): install it or set it to false"
        ) from error
    if hf.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"Liger has no kernels for models of type {hf.config.model_type}: set learner.liger to false")
    _apply_liger_kernel_to_instance(model=hf, cross_entropy=False, fused_linear_cross_entropy=False)


def _require_plain_head(hf: Any, *, path: str) -> None:
    config = hf.config
    if getattr(hf.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(f"{path}: a head with a bias is not supported")
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"{path}: models with {name} are not supported")
    for name in ("attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout"):
        if getattr(config, name, 0.0) not in (None, 0, 0.0):
            raise ValueError(f"{path}: {name} must be 0, training and sampling would disagree")
