"""rewardd alone: the known pairs of every lane that serves, through the real workers and the real sandbox."""

from collections.abc import Iterator

from protocol.config import Config
from protocol.errors import ExitStatus, UserError
from rewardd.judge import Judge
from rewardd.scorers import Lane

DEADLINE_S = 120.0


def smoke_reward(config: Config) -> Iterator[str]:
    """Yields a line per lane that judges right.

    Raises:
        UserError: a lane does not.
    """
    lanes: list[Lane] = ["math", "code"] if config.rewardd.code.enabled else ["math"]
    judge = Judge(config.rewardd)
    try:
        for lane in lanes:
            if not judge.prove(lane, deadline_s=DEADLINE_S):
                why = judge.problems() or f"no verdict in {DEADLINE_S:g} s"
                raise UserError(f"reward: the {lane} scorers are not right: {why}", status=ExitStatus.UNHEALTHY)
            yield f"{lane}: the known answers are judged right"
    finally:
        judge.close()
