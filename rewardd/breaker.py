"""A circuit breaker: a scorer that fails for everything is left alone for a while."""

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0


class Breaker:
    """Closed: all tasks pass. Open, after `num_failures` tasks in a row that could not be judged: none passes until a
    pause is over, then one, as a probe; judged, it closes the breaker, else the pause doubles (0.5 s to 30 s).

    A task counts once, however often it is tried again: one poisonous answer opens nothing.
    """

    def __init__(self, *, num_failures: int) -> None:
        self.is_open = False
        self.retry_at = 0.0
        self.num_opened = 0
        self._limit = num_failures
        self._in_a_row = 0
        self._pause_s = FIRST_PAUSE_S
        self._probe: int | None = None

    def admits(self, task: int, *, now: float) -> bool:
        """Whether a task may run now; an admitted one is to be noted when it ends."""
        if not self.is_open:
            return True
        if self._probe is None and now >= self.retry_at:
            self._probe = task
        return self._probe == task

    def note(self, task: int, *, judged: bool, is_first_try: bool, now: float) -> None:
        """A task has ended."""
        was_probe = self._probe == task
        if was_probe:
            self._probe = None
        if judged:
            self.is_open, self._in_a_row, self._pause_s = False, 0, FIRST_PAUSE_S
            return
        if not self.is_open:
            self._in_a_row += is_first_try
            if self._limit and self._in_a_row >= self._limit:
                self.is_open, self.retry_at = True, now + self._pause_s
                self.num_opened += 1
        elif was_probe:
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
            self.retry_at = now + self._pause_s
