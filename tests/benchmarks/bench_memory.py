"""The memory estimate of `check` and `plan` against the peak that PyTorch saw in real updates (GPU).

The model of `bench learner` (1.5 B parameters, random weights), 2 sequences of 8,192 tokens in one micro-batch, with
none, half and all of the layers recomputed.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from protocol.config.memory import GIB, RUNTIME_BYTES, ModelFacts, trainer_memory
from protocol.errors import UserError
from tests.benchmarks.bench_learner import GPU_CASE, EngineLoop, build_model, engine_config, release, timed


def run(quick: bool = False) -> dict[str, dict[str, object]]:
    """Figure ``estimate_over_peak`` and, per share of recomputed layers, estimate and peak in GiB.

    PyTorch does not see the CUDA context, so the estimate's part for it is left out. Raises UserError without a GPU.
    """
    if not torch.cuda.is_available():
        raise UserError("bench memory needs a GPU: on CPUs compare learner/resident_mb of a run with `slipstream plan`")
    device = torch.device("cuda", 0)
    figures: dict[str, dict[str, object]] = {}
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        build_model(GPU_CASE, model, device=device)
        release(device)
        facts = ModelFacts.of_folder(model)
        for share in (1.0,) if quick else (0.0, 0.5, 1.0):
            config = engine_config(GPU_CASE, model, device=device, share=share, liger=False)
            loop = EngineLoop(config, case=GPU_CASE, device=device)
            timed(loop.step, num=2, device=device)
            peak = torch.cuda.max_memory_allocated(device)
            loop.close()
            release(device)
            estimate = trainer_memory(facts, config).total - RUNTIME_BYTES
            ratios.append(estimate / peak)
            for name, size in (("estimate", estimate), ("peak", float(peak))):
                value = size / GIB
                figures[f"{name}_gib_recompute_{share:g}"] = _figure([value], "GiB")
    return {"estimate_over_peak": _figure(ratios, "ratio"), **figures}


def _figure(values: list[float], unit: str) -> dict[str, object]:
    middle = sorted(values)[len(values) // 2]
    return {"value": middle, "unit": unit, "spread": [min(values), max(values)], "num_runs": len(values)}


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
