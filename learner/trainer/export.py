"""The policy as a Hugging Face folder: weights, configuration, tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from learner.weights.snapshot import Snapshot

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".safetensors.index.json", ".bin.index.json")


def checkpoint_tensors(hf: Any, tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Parameters of a transformers model under the names and shapes its published checkpoints use.

    transformers holds the experts of a mixture in fused tensors; checkpoints, and the engines that read them, have one
    tensor per expert and projection. Models without such a difference come back as they are.
    """
    from transformers.core_model_loading import revert_weight_conversion

    converted = revert_weight_conversion(hf, dict(tensors))
    if converted.keys() == dict(tensors).keys():
        return tensors
    return [(name, tensor.contiguous()) for name, tensor in converted.items()]


def export_model(snapshot: Snapshot, *, source: Path, tokenizer: Path, target: Path) -> Path:
    """Writes ``target``, replacing it in one step; returns it.

    Everything but the weights is copied from ``source`` (the model folder) and ``tokenizer``; transformers' and vLLM's
    loaders take the result as it is. Raises OSError when the disk is full; an older export survives then.
    """
    scratch = target.with_name(f".{target.name}-{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        for folder in dict.fromkeys((source, tokenizer)):
            for file in folder.iterdir():
                if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
                    shutil.copyfile(file, scratch / file.name)
        _write_weights(dict(snapshot.tensors), scratch)
        config = json.loads((scratch / "config.json").read_text())
        config["dtype"] = str(snapshot.tensors[0][1].dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
        config.pop("quantization_config", None)
        (scratch / "config.json").write_text(json.dumps(config, indent=2))
        old = target.with_name(f".{target.name}-old-{os.getpid()}")
        if target.exists():
            target.rename(old)
        scratch.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return target


def _write_weights(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    split = split_torch_state_dict_into_shards(tensors)
    for filename, names in split.filename_to_tensors.items():
        part = {name: tensors[name].cpu() for name in names}
        save_file(part, folder / filename, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
