import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.entropy import AdaptiveEntropy, FixedEntropy
from tests.learner.algorithms import naive


@given(st.lists(st.floats(0, 1), max_size=40))
def test_adaptive_controller_matches_the_paper(entropies: list[float]) -> None:
    controller = AdaptiveEntropy(target=0.2, delta=0.005, max_coef=0.02)
    actual = [controller.step(entropy=e) for e in entropies]
    assert actual == pytest.approx(naive.adaptive_entropy(entropies, 0.2, 0.005, 0.0, 0.02))


def test_there_is_no_lag_between_entropy_and_bonus() -> None:
    controller = AdaptiveEntropy(target=0.2, delta=0.005, max_coef=0.02, coef=0.01)
    assert controller.step(entropy=0.1) == 0.01  # low entropy at this update: a bonus in this update
    assert controller.step(entropy=0.3) == 0.0  # high again: none, at once


def test_controllers_resume_from_their_state() -> None:
    controller = AdaptiveEntropy(target=0.2, delta=0.005, max_coef=0.02)
    controller.step(entropy=0.1)
    resumed = AdaptiveEntropy(target=0.2, delta=0.005, max_coef=0.02)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.step(entropy=0.1) == controller.step(entropy=0.1) == 0.005
    fixed = FixedEntropy()
    fixed.load_state_dict({"coef": 0.25})
    assert fixed.step(entropy=0.0) == 0.25
    assert fixed.state_dict() == {"coef": 0.25}


def test_useless_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="min_coef <= coef <= max_coef"):
        AdaptiveEntropy(target=0.2, delta=0.005, max_coef=0.02, coef=0.1)
