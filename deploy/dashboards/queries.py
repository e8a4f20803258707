"""PromQL over the table of metrics: which metrics a query uses, and the selector that all of them get."""

import re

JOB = "slipstream"
"""The scrape job of coordinators; the roles' own ports have another, so that nothing is counted twice."""

_METRIC = re.compile(r"\b(slipstream_\w+)(?:\{([^}]*)\})?")


def used_metrics(query: str) -> set[str]:
    """Names of this project's samples in a query."""
    return {match[1] for match in _METRIC.finditer(query)}


def scoped(query: str, *, selector: str = "") -> str:
    """The query with every metric limited to the job of coordinators and to `selector`."""

    def limited(match: re.Match[str]) -> str:
        parts = [f'job="{JOB}"', selector, match[2] or ""]
        return f"{match[1]}{{{','.join(part for part in parts if part)}}}"

    return _METRIC.sub(limited, query)
