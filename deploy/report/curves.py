"""Curves of a run as PNG images."""

import io
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]

METRIC_CURVES = (
    ("Mean reward", ("rollout/reward_mean", "rollout/correct_fraction")),
    ("Answer length, tokens", ("rollout/response_tokens_mean",)),
    ("Entropy, nats per token", ("actor/entropy",)),
    ("KL to the behaviour policy, nats per token", ("actor/kl_behaviour",)),
    ("Staleness of trained tokens, versions", ("staleness/token_mean", "staleness/token_max")),
    ("Gradient norm", ("actor/grad_norm",)),
)
TIMELINE_CURVES = (
    ("Generated tokens per second", ("generated_tokens_per_s",)),
    ("Idle share of the last minute", ("idle/trainer", "idle/generators")),
    ("Resident memory of all processes, GB", ("rss_gb",)),
)


def curve_images(metrics: Sequence[Record], timeline: Sequence[Record]) -> list[tuple[str, bytes]]:
    """(title, PNG) of every curve that has at least one point."""
    groups = [(title, names, metrics, "policy_version", "policy version") for title, names in METRIC_CURVES]
    groups += [(title, names, timeline, "elapsed_s", "seconds") for title, names in TIMELINE_CURVES]
    images = []
    for title, names, records, x_name, x_label in groups:
        lines = {name: _points(records, x_name, name) for name in names}
        lines = {name: points for name, points in lines.items() if points[0]}
        if lines:
            images.append((title, _png(title, lines, x_label)))
    return images


def _points(records: Sequence[Record], x_name: str, name: str) -> tuple[list[float], list[float]]:
    rows = [(r[x_name], r[name]) for r in records if isinstance(r.get(name), int | float) and x_name in r]
    return [x for x, _ in rows], [y for _, y in rows]


def _png(title: str, lines: dict[str, tuple[list[float], list[float]]], x_label: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 2.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, (xs, ys) in lines.items():
        axes.plot(xs, ys, label=name, marker="." if len(xs) < 60 else None)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend(fontsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
