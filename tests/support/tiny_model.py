"""The tiny random Llama that tests share; it lives with `slipstream soak`, which uses it too."""

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
    "build_tiny_tokenizer",
]
