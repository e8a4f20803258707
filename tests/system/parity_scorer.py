"""A scorer of another package: an answer is right when its code points add up to an even number."""

from pathlib import Path

from protocol.config.services import RewarddSection
from rewardd.scorers import Canary, Lane, Outcome, Task

NAME = "parity"


def is_right(text: str) -> bool:
    """Whether the code points add up to an even number, as for about half of all random answers."""
    return sum(map(ord, text)) % 2 == 0


class ParityScorer:
    """`Scorer` whose outcome depends on the text alone."""

    name = NAME
    lane: Lane = "inline"
    pure = True
    deadline_s = 1.0

    def __init__(self, section: RewarddSection) -> None:
        del section

    def score(self, task: Task) -> Outcome:
        right = is_right(task.response)
        return Outcome(kind="correct" if right else "wrong", reason=NAME, value=float(right), has_form=True)

    def canaries(self) -> list[Canary]:
        return []


def install(folder: Path) -> None:
    """What `pip install --target FOLDER` leaves of a package that offers the scorer: put the folder in PYTHONPATH."""
    info = folder / "parity_scorer-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parity-scorer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[slipstream.scorers]\n{NAME} = {__name__}:ParityScorer\n")
