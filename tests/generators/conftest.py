"""Fixtures of the generator's tests."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ExitStatus
from tests.generators.support import FakeRun, make_config
from tests.support.tiny_model import build_tiny_tokenizer


@pytest.fixture
def fake_run() -> Iterator[FakeRun]:
    run = FakeRun()
    yield run
    run.close()


class RunningGenerator:
    """`generators.main` in a thread of this process (signals are tested with real processes)."""

    def __init__(self, config: Any) -> None:
        import asyncio

        from generators.main import Generator

        self.status: ExitStatus | None = None
        self.error: BaseException | None = None

        async def life() -> ExitStatus:
            return await Generator(config, name="g0", signals=False).run()

        def target() -> None:
            try:
                self.status = asyncio.run(life())
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=target, daemon=True)
        self.thread.start()

    def wait(self, deadline_s: float = 30.0) -> ExitStatus | None:
        self.thread.join(deadline_s)
        assert not self.thread.is_alive(), "the generator did not end"
        if self.error is not None:
            raise self.error
        return self.status


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    build_tiny_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def start_scripted(fake_run: FakeRun, tokenizer_folder: Path) -> Iterator[Callable[..., RunningGenerator]]:
    """Starts a scripted generator against `fake_run`; ends it after the test."""
    started: list[RunningGenerator] = []

    def start(**options: Any) -> RunningGenerator:
        engine_args = {"receive": False, "tokens_per_s": 500.0, "mean_tokens": 8, **options.pop("engine_args", {})}
        config = make_config(
            str(tokenizer_folder),
            run_dir=str(tokenizer_folder),
            coordinator=fake_run.address,
            backend="scripted",
            engine_args=engine_args,
            **options,
        )
        started.append(RunningGenerator(config))
        return started[-1]

    yield start
    fake_run.command = "stop"
    for generator in started:
        generator.thread.join(20.0)
