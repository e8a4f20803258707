"""`slipstream` (also `python -m deploy`): the commands, and how errors become exit statuses.

Exit status 0 only when the thing asked for happened; a user's mistake is one clear line, never a traceback.
"""

import errno
import logging
import os
import sys
import threading
from typing import NoReturn

import typer

from deploy.commands import (
    configuration,
    dashboards,
    data,
    demo,
    doctor,
    local,
    operators,
    plan,
    roles,
    scoring,
    smoke,
    soak,
    tools,
    units,
    verl,
)
from protocol.errors import ExitStatus, UserError

CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]
"""Base of all errors in a command line, whichever click typer brings."""

ENVIRONMENT_ERRORS = {
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EROFS,
    errno.ENOSPC,
    errno.EEXIST,
}
"""A path that cannot be used is the user's to mend, not a fault of ours."""

app = typer.Typer(
    name="slipstream",
    help="Fully asynchronous reinforcement learning of reasoning language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for family in (
    demo,
    doctor,
    local,
    roles,
    operators,
    configuration,
    dashboards,
    data,
    plan,
    scoring,
    smoke,
    soak,
    tools,
    units,
    verl,
):
    family.register(app)


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its status."""
    leave(run(sys.argv[1:] if arguments is None else arguments))


def leave(status: int) -> NoReturn:
    """End this process; without finalising the interpreter when threads were left behind in a library's call.

    A thread that returns from Gloo or NCCL into an interpreter on its way out is unwound through C++ code that forbids
    it: the process aborts, and the supervisor restarts a role that had finished.
    """
    if any(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Run one command; returns the exit status."""
    logging.getLogger().addHandler(logging.NullHandler())  # roles set up their own; other commands say what matters
    try:
        result = app(arguments, prog_name="slipstream", standalone_mode=False)
    except UserError as mistake:
        _say(str(mistake))
        return int(mistake.status)
    except CommandLineError as mistake:
        _say(mistake.format_message())  # type: ignore[attr-defined]
        return int(ExitStatus.USAGE)
    except (typer.Abort, KeyboardInterrupt):
        _say("interrupted")
        return 130
    except BrokenPipeError:
        return int(ExitStatus.FAILED)
    except OSError as error:
        if error.filename is None or error.errno not in ENVIRONMENT_ERRORS:
            raise
        _say(f"cannot use {error.filename}: {error.strerror}; name another path or make this one usable")
        return int(ExitStatus.DISK_FULL if error.errno == errno.ENOSPC else ExitStatus.CONFIG)
    return result if isinstance(result, int) else 0


def _say(message: str) -> None:
    print(f"slipstream: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
