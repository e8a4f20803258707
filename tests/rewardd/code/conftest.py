from collections.abc import Iterator

import pytest

from rewardd.code import IsolationUnavailable, Sandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """The strongest sandbox that this machine allows."""
    try:
        made = Sandbox()
    except IsolationUnavailable as fault:
        pytest.skip(f"no isolation on this machine: {fault}")
    with made:
        yield made
