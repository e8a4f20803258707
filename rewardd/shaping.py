"""From an outcome to the verdict that is sent: the training reward and its parts."""

from protocol.config.services import ShapingSection
from protocol.messages import Purpose, Verdict
from rewardd.scorers import Outcome


def length_part(num_tokens: int, section: ShapingSection) -> float:
    """0 up to `length_from` response tokens, -length_penalty from `length_to` on, linear between."""
    if not section.length_to or num_tokens <= section.length_from:
        return 0.0
    if num_tokens >= section.length_to:
        return -section.length_penalty
    return -section.length_penalty * (num_tokens - section.length_from) / (section.length_to - section.length_from)


def shape(
    outcome: Outcome, *, purpose: Purpose, scorer: str, section: ShapingSection, num_tokens: int | None = None
) -> Verdict:
    """Verdict of one answer of `num_tokens` response tokens (None: not known, no length penalty).

    score = wrong + (correct - wrong) * value + format_bonus * has_form + length_part for training; for evaluation the
    score is the correctness `value` alone. Unjudged and rejected answers have score 0, which nobody may read.
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
            if section.length_to and num_tokens is not None:
                components["length"] = length_part(num_tokens, section)
                score += components["length"]
    return Verdict(
        kind=outcome.kind,
        score=score,
        reason=outcome.reason,
        scorer=scorer,
        elapsed_ms=outcome.elapsed_ms,
        isolation=outcome.isolation,
        components=components,
        metrics=outcome.metrics if judged else {},
    )
