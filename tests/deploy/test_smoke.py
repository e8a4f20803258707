"""`slipstream smoke`: the parts that are cheap enough for every test run, and what a broken one says."""

from pathlib import Path

import pytest

from deploy.cli import run
from tests.support.stack import write_config


@pytest.fixture
def config(tmp_path: Path) -> str:
    return str(
        write_config(
            tmp_path,
            data__max_prompt_tokens=16,
            trainer__device="cpu",
            trainer__threads_per_rank=1,
        )
    )


def test_reward_judges_the_known_answers(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["smoke", "reward", "--config", config]) == 0
    assert "math: the known answers are judged right" in capsys.readouterr().out
