"""Logging: structured lines, repeats held back and counted."""

import io
import logging

import pytest

from protocol import logs
from protocol.logs import event, setup_logging


@pytest.fixture
def stream():
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    out = io.StringIO()
    handler = setup_logging("rewardd", "rewardd-0", stream=out)
    yield out, handler
    root.handlers[:] = before
    root.setLevel(level)


def test_one_line_per_event_with_fields(stream) -> None:
    out, _ = stream
    event(logging.getLogger("a.b"), logging.WARNING, "peer gone", peer="g-0", reason="silent for 3 s", seconds=1 / 3)
    line = out.getvalue()
    assert line.endswith('WARNING rewardd/rewardd-0 a.b: peer gone peer=g-0 reason="silent for 3 s" seconds=0.333333\n')
    assert line.count("\n") == 1


def test_b62_repeats_are_counted_and_the_fatal_event_is_always_there(stream, monkeypatch) -> None:
    out, _ = stream
    log = logging.getLogger("flood")
    for number in range(5000):
        event(log, logging.WARNING, "dropped", number=number)
    log.critical("fatal")
    monkeypatch.setattr(logs, "WINDOW_S", -1.0)
    log.info("afterwards")
    lines = out.getvalue().splitlines()
    assert sum("dropped number=" in line for line in lines) == 5
    assert any("fatal" in line for line in lines)
    assert any("dropped (repeated)" in line and "held_back=4995" in line for line in lines)
