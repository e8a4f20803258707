"""Fixtures of the coordinator's tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.learner.coordinator.harness import Harness, make_config, prompt_set, rows


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Harness]:
    """Builds a coordinator with `num_prompts` prompts; keyword "a.b" overrides set configuration."""

    def make(num_prompts: int = 20, num_eval: int = 0, **overrides: Any) -> Harness:
        evaluation = prompt_set(tmp_path, rows(num_eval, source="held-out")) if num_eval else None
        return Harness(
            tmp_path, make_config(tmp_path, **overrides), prompt_set(tmp_path, rows(num_prompts)), evaluation
        )

    return make
