"""Runs the model's program in its own process, as `__main__` or as a library of functions.

Nothing here judges: results leave as values (see `values`), and a program that forges its record only forges an
answer to a question whose solution it does not know.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
import types
from typing import Any, Final, NoReturn

from . import values

FILE_NAME: Final = "main.py"


def open_streams() -> None:
    """UTF-8 text streams on descriptors 0, 1 and 2, whatever the locale of the daemon.

    The server opens them once, on a pipe where a test has one: a forked process only changes what the descriptors mean.
    """
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(read)
    os.close(write)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8", errors="surrogateescape"
    )
    for name, number, errors in (("stdout", 1, "surrogateescape"), ("stderr", 2, "backslashreplace")):
        stream = io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(number, "w", closefd=False)),
            encoding="utf-8",
            errors=errors,
            line_buffering=number == 2,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _fresh_module(name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    folder = os.getcwd()
    module.__file__ = f"{folder}/{FILE_NAME}"
    sys.modules[name] = module
    sys.modules["__main__"] = module
    sys.argv = [FILE_NAME]
    sys.path.insert(0, folder)
    handle = os.open(FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    text = source.encode("utf-8", "surrogatepass")
    while text:
        text = text[os.write(handle, text) :]
    os.close(handle)
    return module


def report(channel: int, record: dict[str, Any]) -> None:
    line = values.dump_line(record)
    while line:
        line = line[os.write(channel, line) :]


def _compile(source: str, channel: int) -> types.CodeType:
    try:
        return compile(source, FILE_NAME, "exec", dont_inherit=True)
    except BaseException as fault:
        report(channel, {"fault": "compile", "type": type(fault).__name__, "text": str(fault)[:200]})
        os._exit(1)


def exit_code(fault: SystemExit) -> int:
    if fault.code is None:
        return 0
    if isinstance(fault.code, int):
        return fault.code & 0xFF
    sys.stderr.write(f"{fault.code}\n")
    return 1


def run_main(source: str, channel: int) -> NoReturn:
    """Runs the program as `__main__` as `python main.py` would, then ends the process with its exit code."""
    code = _compile(source, channel)
    os.close(channel)
    module = _fresh_module("__main__", source)
    status = 0
    try:
        exec(code, module.__dict__)
    except SystemExit as fault:
        status = exit_code(fault)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException:
        status = status or 120
    os._exit(status)


def load(source: str, channel: int, *, name: str, prelude: dict[str, Any]) -> dict[str, Any]:
    """Runs the program's top level as module `name` with the prelude's names at hand; returns its namespace.

    A program that raises or exits here is reported and its process ends.
    """
    code = _compile(source, channel)
    module = _fresh_module(name, source)
    module.__dict__.update(prelude)
    try:
        exec(code, module.__dict__)
    except BaseException as fault:
        report(channel, {"fault": "load", "type": type(fault).__name__, "text": str(fault)[:200]})
        os._exit(1)
    return module.__dict__


def find_function(namespace: dict[str, Any], name: str, prelude: dict[str, Any]) -> Any:
    """`Solution().name` if the program has it, else its own top-level `name`; a name of the prelude is not its own."""
    solution = namespace.get("Solution")
    if isinstance(solution, type) and hasattr(solution, name):
        return getattr(solution(), name)
    found = namespace.get(name)
    if not callable(found) or (name in prelude and found is prelude[name]):
        raise NameError(f"the program defines no function {name!r}")
    return found


def run_function(source: str, channel: int, *, name: str, arguments: Any, prelude: dict[str, Any]) -> NoReturn:
    """Calls one function of the program and reports the value it returns.

    Args:
        arguments: encoded list of positional arguments.
    """
    encoder = values.Encoder()
    decoded = values.Decoder().decode(arguments)
    namespace = load(source, channel, name="__main__", prelude=prelude)
    try:
        result = find_function(namespace, name, prelude)(*decoded)
        record: dict[str, Any] = {"value": encoder.encode(result)}
    except BaseException as fault:
        record = {"fault": "call", "type": type(fault).__name__, "text": ""}
    report(channel, record)
    os._exit(0)
