"""Which tensors a whole version of the model consists of, and whether an offer holds exactly those.

The reference is the checkpoint the engine itself was started from, read from the headers of its safetensors files.
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from protocol.messages import TensorSpec

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TIED = "lm_head.weight"


def checkpoint_tensors(folder: str | Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of every tensor in a folder's safetensors files; {} when it has none (dummy weights)."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            tensors[name] = (_DTYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]))
    return tensors


def is_tied(folder: str | Path) -> bool:
    """Whether the folder's config shares the output layer's weights with the embedding (False without a config)."""
    path = Path(folder) / "config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    return bool(settings.get("tie_word_embeddings", settings.get("text_config", {}).get("tie_word_embeddings", False)))


def check_coverage(
    specs: Sequence[TensorSpec], expected: dict[str, tuple[str, tuple[int, ...]]], *, tied: bool
) -> None:
    """An offer must hold every tensor of the checkpoint, in its shape, and nothing else.

    Floating types may differ: the engine casts once, on loading, to the type it computes in. A tied output layer may be
    sent or left out.

    Raises:
        ValueError: naming the tensors that are missing, unknown, twice there, or of another shape or type.
    """
    if not expected:
        return
    offered = {spec.name: spec for spec in specs}
    optional = {_TIED} if tied else set()
    problems = [f"{spec.name} twice" for spec in specs if offered[spec.name] is not spec]
    problems += [f"{name} missing" for name in expected if name not in offered and name not in optional]
    problems += [f"{name} unknown" for name in offered if name not in expected and name not in optional]
    for name, spec in offered.items():
        if name not in expected:
            continue
        dtype, shape = expected[name]
        if tuple(spec.shape) != shape:
            problems.append(f"{name} has shape {tuple(spec.shape)}, not {shape}")
        if spec.dtype != dtype and not (_is_floating(spec.dtype) and _is_floating(dtype)):
            problems.append(f"{name} has type {spec.dtype}, not {dtype}")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"the offered tensors are not this model's: {'; '.join(problems[:5])}{more}")


def _is_floating(dtype: str) -> bool:
    return dtype in _DTYPES.values()
