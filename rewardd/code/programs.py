"""One program run for its output, without tests: what a code tool needs."""

from __future__ import annotations

from rewardd.code.execution import Run, run_main
from rewardd.code.limits import Limits
from rewardd.code.sandbox import Sandbox
from rewardd.code.slot import InfraError

_NUM_TRIES = 2


def run_program(sandbox: Sandbox, *, program: str, limits: Limits, stdin: bytes = b"") -> Run:
    """Runs a program in a sandbox slot; blocks until nothing of it is left.

    Returns:
        How it ended, with what it printed up to then.

    Raises:
        InfraError: the sandbox failed twice; nothing is known about the program.
    """
    for attempt in range(_NUM_TRIES):
        try:
            with sandbox.slot() as slot:
                return run_main(slot, program=program, stdin=stdin, limits=limits, time_s=limits.time_limit_s)
        except (InfraError, OSError) as fault:
            if attempt == _NUM_TRIES - 1:
                raise InfraError(f"the code sandbox failed: {fault}") from fault
    raise AssertionError("unreachable")
