"""Tiny random models that tests share; the Llama lives with `slipstream soak`, which uses it too."""

from pathlib import Path

from deploy.prepare.tiny_model import (
    CHAT_TEMPLATE,
    NUM_BYTES,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    build_tiny_model,
    build_tiny_tokenizer,
)

__all__ = [
    "CHAT_TEMPLATE",
    "NUM_BYTES",
    "SPECIAL_TOKENS",
    "VOCAB_SIZE",
    "build_tiny_model",
    "build_tiny_moe",
    "build_tiny_tokenizer",
]


def build_tiny_moe(path: str | Path, *, seed: int = 0) -> Path:
    """Writes a random Qwen3-MoE (hidden 64, 2 layers, 4 experts, 2 per token) in float32 and its tokenizer."""
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    build_tiny_tokenizer(path)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=NUM_BYTES,
        bos_token_id=None,
        eos_token_id=NUM_BYTES + 2,
        initializer_range=0.08,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=NUM_BYTES + 2, pad_token_id=NUM_BYTES)
    model.save_pretrained(path)
    return path
