"""report.html: one self-contained page."""

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

from deploy.report.records import Comparison

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1120px; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .25rem .8rem; border-bottom: 1px solid #ddd; }
th { text-align: left; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 540px; width: 100%; } .curves { display: flex; flex-wrap: wrap; gap: .5rem; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; }
"""


def render(
    *,
    title: str,
    rows: Sequence[Comparison],
    facts: Mapping[str, Any],
    advice: Sequence[str],
    images: Sequence[tuple[str, bytes]],
    answers: Sequence[Mapping[str, Any]],
    config: str,
) -> str:
    """The whole page."""
    parts = [
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{html.escape(title)}</title>",
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
        "<h2>Held-out prompts before and after</h2>",
        _comparison_table(rows),
        "<h2>The run</h2>",
        _table(("", ""), [(key, value) for key, value in facts.items()]),
        "<h2>Advice</h2>",
        _advice(advice),
        "<h2>Curves</h2><div class=curves>",
        *(f'<img alt="{html.escape(name)}" src="data:image/png;base64,{_b64(png)}">' for name, png in images),
        "</div>",
    ]
    if answers:
        keys = ("policy_version", "prompt", "response", "score", "verdict")
        parts += ["<h2>Some answers</h2>", _table(keys, [tuple(a.get(k, "") for k in keys) for a in answers])]
    parts += [f"<h2>Configuration</h2><pre>{html.escape(config)}</pre></body></html>"]
    return "\n".join(parts)


def _advice(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if lines else "<p>None: every figure is in its range (docs/tuning.md has the rules).</p>"


def _comparison_table(rows: Sequence[Comparison]) -> str:
    if not rows:
        return "<p>Not evaluated before and after.</p>"
    header = ("", "prompts", "before", "after", "difference", "in standard errors")
    body = [
        (
            row.kind,
            row.num_prompts,
            f"{row.before:.3f} ± {row.before_se:.3f} (version {row.version_before})",
            f"{row.after:.3f} ± {row.after_se:.3f} (version {row.version_after})",
            f"{row.difference:+.3f}",
            f"{row.standard_errors:+.1f}",
        )
        for row in rows
    ]
    return _table(header, body)


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(_cell(value) for value in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"<td class=n>{value:.4g}</td>"
    return f"<td{' class=n' if isinstance(value, int) else ''}>{html.escape(str(value))}</td>"


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
