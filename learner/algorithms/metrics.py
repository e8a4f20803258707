"""Metrics as sums that add up over micro-batches and ranks, and their final values by name.

The keys of the sums depend on the configuration alone, not on the data, so ranks can stack the values in key order
and reduce them in one collective. ``finalize_metrics`` turns reduced sums into named numbers; a metric whose
denominator is 0 is left out rather than reported as 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.importance import BehaviourWeights
from learner.algorithms.losses import TokenLoss
from learner.algorithms.tensors import MAX_LOG_RATIO, masked, masked_sum, num_sequences, segment_count

MetricSums = dict[str, Tensor]

LENGTH_EDGES = (512, 2048, 8192, 32_768)
"""Upper edges, in trained tokens, of the length classes of ``importance/capped_share/<class>``; the last is open."""
RATIO_EDGES = (0.5, 0.8, 0.9, 0.99, 1.01, 1.1, 1.25, 2.0)
"""Edges of the histogram ``actor/ratio_share/<bin>`` of current over anchor policy."""

MEANS: dict[str, tuple[str, str]] = {
    "actor/loss": ("loss", "updates"),
    "actor/pg_loss": ("pg_loss", "updates"),
    "critic/vf_loss": ("vf_loss", "vf_updates"),
    "actor/entropy": ("entropy", "tokens"),
    "actor/entropy_loss": ("nll", "tokens"),
    "actor/ppo_kl": ("ppo_kl", "tokens"),
    "actor/kl_behaviour": ("kl_behaviour", "tokens"),
    "actor/kl_ref": ("kl_ref", "tokens"),
    "actor/ratio_mean": ("ratio", "tokens"),
    "actor/clip_fraction_high": ("clipped_high", "tokens"),
    "actor/clip_fraction_low": ("clipped_low", "tokens"),
    "actor/clip_fraction_dual": ("clipped_dual", "tokens"),
    "actor/bounded_share": ("bounded", "tokens"),
    "importance/rho_mean": ("rho", "tokens"),
    "importance/weight_mean": ("weight", "tokens"),
    "importance/capped_share": ("capped", "tokens"),
    "importance/probs_diff_mean": ("probs_diff", "tokens"),
    "critic/vf_clipfrac": ("vf_clipped", "vf_tokens"),
    "critic/vpred_mean": ("vpred", "vf_tokens"),
    "critic/returns_mean": ("return", "vf_tokens"),
    "staleness/masked_share": ("stale_tokens", "sampled_tokens"),
    "staleness/age_mean": ("age", "sampled_tokens"),
    "critic/score/mean": ("score", "seqs"),
    "response_length/mean": ("response_length", "seqs"),
    "response_length/cut_share": ("response_cut", "seqs"),
}
"""Metric name to (numerator, denominator) among the sums. ``updates`` is trained tokens over the batch's trained
tokens: 1 for a whole mini-batch, so that losses stay means when the sums of several mini-batches are added."""

TOTALS: dict[str, str] = {"learner/trained_tokens": "tokens"}
"""Metric name to the sum that is its value."""


def length_classes() -> list[str]:
    """Names of the length classes in ascending order: ``le_512`` ... ``gt_32768``."""
    return [f"le_{edge}" for edge in LENGTH_EDGES] + [f"gt_{LENGTH_EDGES[-1]}"]


def ratio_bins() -> list[str]:
    """Names of the ratio bins in ascending order: ``lt_0.5`` ... ``ge_2.0``; each is named by one edge."""
    return [f"lt_{edge}" for edge in RATIO_EDGES] + [f"ge_{RATIO_EDGES[-1]}"]


@torch.no_grad()
def policy_metric_sums(
    *,
    loss: Tensor,
    pg_loss: Tensor,
    token: TokenLoss,
    weights: BehaviourWeights,
    logp_T: Tensor,
    logp_prox_T: Tensor,
    logp_behaviour_T: Tensor,
    mask_T: Tensor,
    seq_id_T: Tensor,
    entropy_T: Tensor | None,
    kl_ref_T: Tensor | None,
    num_tokens_global: int,
) -> MetricSums:
    """Sums (0-d float64) of one micro-batch; masked positions take no part in any of them."""
    logp_T, prox_T, behaviour_T = (masked(x.detach(), mask_T).double() for x in (logp_T, logp_prox_T, logp_behaviour_T))
    gap_T = torch.stack([logp_T - prox_T, prox_T - behaviour_T, logp_T - behaviour_T]).abs().amax(dim=0)
    ratio_T = token.diagnostics["ratio"]
    capped_T = weights.capped_T

    def total(x_T: Tensor) -> Tensor:
        return masked_sum(x_T.double(), mask_T)

    sums = {
        "loss": loss.detach().double(),
        "pg_loss": pg_loss.detach().double(),
        "tokens": mask_T.sum().double(),
        "updates": mask_T.sum().double() / num_tokens_global,
        "nll": total(-logp_T),
        "ppo_kl": total(prox_T - logp_T),
        "kl_behaviour": total(behaviour_T - logp_T),
        "bounded": total(gap_T > MAX_LOG_RATIO),
        "probs_diff": total((prox_T.clamp(max=0).exp() - behaviour_T.clamp(max=0).exp()).abs()),
        "ratio": total(ratio_T),
        "rho": total(weights.rho_T),
        "weight": total(weights.weight_T),
        "weight_square": total(weights.weight_T.double().square()),
        "capped": total(capped_T),
    }
    for name in ("clipped_high", "clipped_low", "clipped_dual"):
        if name in token.diagnostics:
            sums[name] = total(token.diagnostics[name])
    if entropy_T is not None:
        sums["entropy"] = total(entropy_T.detach())
    if kl_ref_T is not None:
        sums["kl_ref"] = total(kl_ref_T.detach())

    length_T = segment_count(mask_T, seq_id_T, num_seqs=num_sequences(seq_id_T))[seq_id_T]
    class_T = torch.bucketize(length_T, torch.tensor(LENGTH_EDGES, device=mask_T.device))
    for index, name in enumerate(length_classes()):
        inside_T = class_T == index
        sums[f"tokens/{name}"] = total(inside_T)
        sums[f"capped/{name}"] = total(inside_T & capped_T)
    edges = torch.tensor(RATIO_EDGES, dtype=torch.float64, device=mask_T.device)
    bin_T = torch.bucketize(ratio_T.double(), edges, right=True)
    for index, name in enumerate(ratio_bins()):
        sums[f"ratio/{name}"] = total(bin_T == index)
    return sums


def sequence_metric_sums(*, score_S: Tensor, length_S: Tensor, truncated_S: Tensor) -> MetricSums:
    """Sums for ``critic/score/mean``, ``response_length/mean`` and ``response_length/cut_share`` of sequences."""
    return {
        "seqs": torch.tensor(float(score_S.numel()), dtype=torch.float64, device=score_S.device),
        "score": score_S.double().sum(),
        "response_length": length_S.double().sum(),
        "response_cut": truncated_S.double().sum(),
    }


def add_metric_sums(total: MetricSums, part: MetricSums) -> MetricSums:
    """Key-wise sum of two dictionaries of sums; a key that only one has keeps its value."""
    return {
        key: total[key] + part[key] if key in total and key in part else total.get(key, part.get(key))  # type: ignore[misc]
        for key in [*total, *(key for key in part if key not in total)]
    }


def finalize_metrics(sums: MetricSums) -> dict[str, float]:
    """Named values from sums over the whole batch: means, totals, histograms, ESS and explained variance."""
    value = {key: float(x) for key, x in sums.items()}
    result = {name: value[key] for name, key in TOTALS.items() if key in value}

    def put(name: str, numerator: str, denominator: str) -> None:
        if numerator in value and value.get(denominator, 0.0) > 0:
            result[name] = value[numerator] / value[denominator]

    for name, (numerator, denominator) in MEANS.items():
        put(name, numerator, denominator)
    for name in length_classes():
        put(f"importance/capped_share/{name}", f"capped/{name}", f"tokens/{name}")
    for name in ratio_bins():
        put(f"actor/ratio_share/{name}", f"ratio/{name}", "tokens")
    for key in value:
        if key.startswith("age/"):
            put(f"staleness/age_share/{key.removeprefix('age/')}", key, "sampled_tokens")
    if value.get("weight_square", 0.0) > 0:
        result["importance/ess"] = value["weight"] ** 2 / (value["tokens"] * value["weight_square"])
    explained = _explained_variance(value)
    if explained is not None:
        result["critic/vf_explained_var"] = explained
    return result


def _explained_variance(value: dict[str, float]) -> float | None:
    count = value.get("vf_tokens", 0.0)
    if count <= 0:
        return None
    variance = value["return_square"] / count - (value["return"] / count) ** 2
    residual = value["residual_square"] / count - (value["residual"] / count) ** 2
    if variance <= 1e-12 * max(1.0, value["return_square"] / count):
        return None
    return 1.0 - residual / variance
