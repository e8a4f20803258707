"""The channel between the test process and the program's process: JSON lines over a socket, values only.

The test process asks (`call`, `get`, ...), the program's process answers with a value, a handle on an object that is
not data, or the names of an exception's classes. While it works it may call back functions that the tests gave it.
Neither side can read anything of the other that is not handed over this way.
"""

from __future__ import annotations

import os
from typing import Any, Final

from . import values

_MAX_LINE_BYTES: Final = 64 << 20


class LinkClosed(BaseException):
    """The other process has ended, or does not keep to the protocol. Not an `Exception`, so that test code which
    expects an exception of the program does not take it for one."""


class Link:
    """One end of the channel."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._buffer = bytearray()

    def send(self, message: list[Any]) -> None:
        line = memoryview(values.dump_line(message))
        try:
            while line:
                line = line[os.write(self._handle, line) :]
        except OSError as fault:
            raise LinkClosed(str(fault)) from None

    def receive(self) -> list[Any]:
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            try:
                chunk = os.read(self._handle, 1 << 18)
            except OSError as fault:
                raise LinkClosed(str(fault)) from None
            if not chunk or searched > _MAX_LINE_BYTES:
                raise LinkClosed("the other process has ended")
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            message = values.load_line(line)
        except ValueError as fault:
            raise LinkClosed(str(fault)) from None
        if not isinstance(message, list) or not message or not isinstance(message[0], str):
            raise LinkClosed("malformed message")
        return message
