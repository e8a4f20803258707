"""Work in threads that can be left behind."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(name: str, function: Callable[[], T]) -> "Future[T]":
    """Runs a function in a daemon thread of its own: a call that hangs in a library does not hold up the exit."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
