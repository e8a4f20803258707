"""The table of metrics: complete, true to the code, and its page up to date."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest

from protocol.config.keys import leaf_fields, section_keys
from protocol.endpoint import MetricsServer, samples
from protocol.metrics import all_metrics, families, find, placed, unregistered
from protocol.metrics.page import metrics_markdown
from protocol.metrics.run import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "generators", "rewardd", "learner", "deploy")
NAMESPACES = {metric.name.partition("/")[0] for metric in all_metrics() if "/" in metric.name and metric.labels == ()}
NAME = re.compile(r"[a-z0-9_.\0]+(/[a-z0-9_@.\0]+)+")


def literals() -> Iterator[tuple[str, str]]:
    """(file, text) of every string in the code; what an f-string fills in is a NUL."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path.parent.name == "metrics" and path.parent.parent.name == "protocol":
                continue
            inside: set[int] = set()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                    inside |= {id(part) for part in node.values}
                    yield str(path.relative_to(ROOT)), "".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                    yield str(path.relative_to(ROOT)), node.value


def test_every_metric_named_anywhere_in_the_code_is_in_the_table() -> None:
    named = [(file, text) for file, text in literals() if NAME.fullmatch(text)]
    named = [(file, text) for file, text in named if text.partition("/")[0] in NAMESPACES]
    assert len(named) > 100
    unknown = [(file, text) for file, text in named if "\0" not in text and not _known(text)]
    assert not unknown, "add them to protocol/metrics/"
    patterns = [(file, text.replace("\0", "x")) for file, text in named if "\0" in text]
    assert not [(file, text) for file, text in patterns if find(text) is None and not _covers(text)]


def _known(text: str) -> bool:
    """Whether it is a metric, or what the names of several begin with."""
    return find(text) is not None or any(metric.name.startswith(f"{text}/") for metric in all_metrics())


def _covers(text: str) -> bool:
    """Whether an f-string stands for several plain rows, such as rewardd/{counter}."""
    shape = re.compile(re.escape(text).replace("x", ".+"))
    return any(shape.fullmatch(metric.name) for metric in all_metrics())


def test_no_row_is_about_what_the_code_never_emits() -> None:
    texts = {text for _, text in literals()}
    words = {word for text in texts for word in re.split(r"[/\0]", text)}
    names = {node.attr for package in PACKAGES for path in (ROOT / package).rglob("*.py")
             for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}  # fmt: skip
    for metric in all_metrics():
        last = next(piece for piece in reversed(re.split(r"[/]|<[a-z_]+>", metric.name)) if piece.strip("_"))
        assert last in words or last in names or any(last in text for text in texts if "\0" in text), metric.name


def test_settings_named_in_the_table_exist() -> None:
    known = dict(leaf_fields()).keys() | dict(section_keys()).keys()
    sections = "|".join({key.partition(".")[0] for key in known if "." in key})
    for metric in all_metrics():
        for setting in re.findall(rf"\b(?:{sections})\.[a-z_.]*[a-z]", f"{metric.normal} {metric.action}"):
            assert setting in known, metric.name


def test_rows_are_distinct_and_say_what_they_mean() -> None:
    assert len({metric.name for metric in all_metrics()}) == len(all_metrics())
    assert len(families()) == len(all_metrics()) + len(FAMILIES), "two rows would share a Prometheus family"
    assert all(metric.unit and metric.meaning for metric in all_metrics())
    assert not [metric.name for metric in all_metrics() if metric.action.startswith("as ") and not metric.normal]


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == metrics_markdown(), "run `slipstream config metrics > docs/metrics.md`"


@pytest.mark.parametrize(
    ("name", "sample", "labels"),
    [
        ("actor/entropy", "slipstream_actor_entropy", {}),
        ("critic/score/mean", "slipstream_critic_score_mean", {}),
        ("critic/score/openai/gsm8k/mean", "slipstream_critic_score_mean_by_source", {"source": "openai/gsm8k"}),
        ("verdicts/wrong", "slipstream_verdicts_by_verdict_total", {"verdict": "wrong"}),
        ("rewardd/code/queued", "slipstream_rewardd_queued_by_lane", {"lane": "code"}),
        ("rewardd/wire/sent", "slipstream_rewardd_wire_sent_total", {}),
        ("my_package/figure", "slipstream_metric", {"metric": "my_package/figure"}),
    ],
)
def test_names_become_families_and_labels(name: str, sample: str, labels: dict[str, str]) -> None:
    row, found = placed(name)
    assert (row.sample, found) == (sample, labels)


def test_a_scrape_survives_samples_that_clash() -> None:
    server = MetricsServer(0, setting="x")
    server.current = [
        *samples({"perf/update_seconds": 3.0, "trained_tokens": 5.0}),
        *samples({"perf/update_seconds": 4.0}, role="trainer", name="t"),
        *samples({"generator/running": 1.0}, role="generator", name="g"),
        *samples({"generator/running": 2.0}, role="generator", name="g"),
    ]
    text = generate_latest(server).decode()
    assert "slipstream_perf_update_seconds 3.0" in text and "# TYPE slipstream_trained_tokens_total counter" in text
    assert text.count("slipstream_generator_running{") == 1
    assert unregistered(["actor/entropy", "nonsense"]) == ["nonsense"]
