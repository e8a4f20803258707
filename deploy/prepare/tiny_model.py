"""A tiny random Llama with a byte-level tokenizer, as a Hugging Face folder that transformers and vLLM load."""

import json
from pathlib import Path

NUM_BYTES = 256
SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 320  # 256 bytes, the special tokens, and rows no token uses (as real models have)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_tokenizer(path: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json: one token per byte, pad 256, im_start 257, im_end (eos) 258."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) == NUM_BYTES
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "eos_token": "<|im_end|>",
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def build_tiny_model(path: str | Path, *, seed: int = 0, dtype: str = "float32", tied: bool = True) -> Path:
    """Writes a random Llama (hidden 64, 2 layers, 4 heads of 32, vocabulary 320) and its tokenizer; returns `path`.

    The head size is 32 because vLLM's CPU attention has no smaller one. `tied` shares embedding and head.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    build_tiny_tokenizer(path)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        pad_token_id=NUM_BYTES,
        bos_token_id=None,
        eos_token_id=NUM_BYTES + 2,
        initializer_range=0.08,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(eos_token_id=NUM_BYTES + 2, pad_token_id=NUM_BYTES)
    model.save_pretrained(path)
    return path
