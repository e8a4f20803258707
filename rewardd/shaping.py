"""From an outcome to the verdict that is sent: the training reward and its parts."""

from protocol.config.services import ShapingSection
from protocol.messages import Purpose, Verdict
from rewardd.scorers import Outcome


def shape(outcome: Outcome, *, purpose: Purpose, scorer: str, section: ShapingSection) -> Verdict:
    """Verdict of one answer.

    score = wrong + (correct - wrong) * value + format_bonus * has_form for training; for evaluation the score is the
    correctness `value` alone. Unjudged and rejected answers have score 0, which nobody may read.
    """
    judged = outcome.kind in ("correct", "partial", "wrong")
    components: dict[str, float] = {}
    score = 0.0
    if judged:
        components = {"correctness": outcome.value}
        if purpose == "eval":
            score = outcome.value
        else:
            bonus = section.format_bonus if outcome.has_form else 0.0
            components["format"] = bonus
            score = section.wrong + (section.correct - section.wrong) * outcome.value + bonus
    return Verdict(
        kind=outcome.kind,
        score=score,
        reason=outcome.reason,
        scorer=scorer,
        elapsed_ms=outcome.elapsed_ms,
        isolation=outcome.isolation,
        components=components,
    )
