"""Packing: cap violations, fill, planning time and balance.

``run(quick)`` gives the figures of ``slipstream bench packing``; run as a script it prints them as JSON.
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

from learner.packing import ModelShape, pack

CAP = 16_384
SHAPE = ModelShape.from_dimensions(
    num_layers=28,
    hidden_size=3584,
    intermediate_size=18_944,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=152_064,
)
"""A 7B model: the shape the FLOPs are balanced by."""


def lognormal_lengths(rng: np.random.Generator, *, num: int, cap: int, sigma: float = 0.8) -> list[int]:
    """Lengths with mean a tenth of the cap, cut to 1..cap."""
    mean = cap / 10
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num)
    return np.clip(drawn, 1, cap).astype(np.int64).tolist()


def adversarial_lengths(rng: np.random.Generator, *, cap: int) -> list[int]:
    """Lengths that break packers whose cap is only a target: just over halves, thirds, full ones and crumbs."""
    kind = int(rng.integers(5))
    num = int(rng.integers(1, 65))
    if kind == 0:
        return [cap - 1] * num
    if kind == 1:
        return [cap // 2 + 1] * num
    if kind == 2:
        return [cap // 3 + 1] * num + [1] * num
    if kind == 3:
        return [cap] * max(1, num // 8) + rng.integers(1, max(2, cap // 4), num).tolist()
    return rng.integers(1, cap + 1, num).tolist()


def count_cap_violations(num_batches: int) -> int:
    """Micro-batches over the cap, and sequences lost or doubled, in random and adversarial batches."""
    rng = np.random.default_rng(0)
    violations = 0
    for batch in range(num_batches):
        cap = int(rng.integers(8, 4096))
        num_ranks = int(rng.integers(1, 9))
        if batch % 2:
            lengths = adversarial_lengths(rng, cap=cap)
        else:
            lengths = lognormal_lengths(rng, num=int(rng.integers(1, 65)), cap=cap)
        plan = pack(lengths, max_tokens=cap, num_ranks=num_ranks, flops=SHAPE)
        used = [sum(lengths[i] for i in m) for rank in plan.micro_batches for m in rank]
        violations += sum(tokens > cap for tokens in used)
        violations += sorted(i for rank in plan.micro_batches for m in rank for i in m) != list(range(len(lengths)))
    return violations


def _figure(values: list[float], unit: str) -> dict[str, object]:
    return {
        "value": statistics.median(values),
        "unit": unit,
        "spread": [min(values), max(values)],
        "num_runs": len(values),
    }


def run(quick: bool = False) -> dict[str, dict[str, object]]:
    """Figures ``cap_violations``, ``fill_fraction``, ``plan_ms_4096`` and ``flops_imbalance_8``."""
    num_batches = 500 if quick else 10_000
    num_plans = 5 if quick else 21
    violations = float(count_cap_violations(num_batches))
    fill, plan_ms, imbalance, lockstep = [], [], [], []
    for seed in range(num_plans):
        lengths = lognormal_lengths(np.random.default_rng(seed), num=4096, cap=CAP)
        start = time.perf_counter()
        plan = pack(lengths, max_tokens=CAP, num_ranks=8, flops=SHAPE)
        plan_ms.append((time.perf_counter() - start) * 1e3)
        fill.append(plan.fill_fraction)
        imbalance.append(plan.flops_imbalance)
        lockstep.append(plan.lockstep_imbalance)
    return {
        "cap_violations": {
            "value": violations,
            "unit": f"micro-batches in {num_batches} batches",
            "spread": [violations, violations],
            "num_runs": 1,
        },
        "fill_fraction": _figure(fill, "tokens per token of capacity"),
        "plan_ms_4096": _figure(plan_ms, "ms"),
        "flops_imbalance_8": _figure(imbalance, "max over mean of 8 ranks"),
        "lockstep_imbalance_8": _figure(lockstep, "sum of slot maxima over mean rank"),
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
