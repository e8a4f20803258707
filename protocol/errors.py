"""Errors a person can act on, and the documented exit statuses of every role."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """Exit status of a role. Only FINISHED is not restarted by a supervisor."""

    FINISHED = 0
    FAILED = 1
    USAGE = 2
    CONFIG = 64
    LOST_DEPENDENCY = 69
    DISK_FULL = 73
    ENGINE_FAILED = 70
    UNHEALTHY = 75
    MEMORY_LIMIT = 76
    NO_PROGRESS = 77
    STOPPED = 143


class UserError(ValueError):
    """A mistake of the user's: shown as one clear line, never as a traceback.

    Attributes:
        status: exit status the command line ends with.
    """

    def __init__(self, message: str, *, status: ExitStatus = ExitStatus.CONFIG) -> None:
        super().__init__(message)
        self.status = status


class PeerUnreachable(UserError):
    """A peer did not answer within its deadline; the message names the address tried."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=ExitStatus.LOST_DEPENDENCY)


class PeerRefused(UserError):
    """A peer answered the hello with a refusal; the message gives both values that disagree."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, status=ExitStatus.CONFIG)
        self.code = code


class FrameError(ValueError):
    """A received message is malformed: counted and dropped, the receiver goes on."""


class MessageTooLarge(UserError):
    """A message is above `transport.max_message_mb`; the sender refuses it before sending."""
