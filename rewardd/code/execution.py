"""One test of one program in a slot: what it printed or returned, or how it failed."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from dataclasses import dataclass
from typing import Any, Final, Literal

from rewardd.code.inside import values
from rewardd.code.limits import Limits
from rewardd.code.slot import Ending, InfraError, Sink, Slot

Status = Literal[
    "passed",
    "wrong_answer",
    "runtime_error",
    "timeout",
    "memory_limit",
    "output_limit",
    "compile_error",
    "infra_error",
    "not_run",
]

_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
START_ALLOWANCE_S: Final = 0.1
REPORT_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Run:
    """`failure` is None when the program ended well; then `output` (stdin) or `value` (function) is its answer."""

    failure: Status | None
    output: bytes = b""
    value: Any = None


def memory_file(content: bytes) -> int:
    """A sealed in-memory file with this content, read from its start."""
    handle = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]
    os.lseek(handle, 0, os.SEEK_SET)
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, _SEALS)
    return handle


def run_main(slot: Slot, *, program: str, stdin: bytes, limits: Limits, time_s: float) -> Run:
    """Runs the program as `__main__` on this standard input.

    Raises:
        InfraError: the sandbox failed; nothing is known about the program.
    """
    stdin_handle = memory_file(stdin)
    out_read, out_write = os.pipe()
    report_read, report_write = os.pipe()
    request = {"role": "program", "mode": "stdin", "program": program}
    fds = {"stdin": stdin_handle, "stdout": out_write, "channel": report_write}
    output = Sink(out_read, limits.output_kb * 1024)
    report = Sink(report_read, REPORT_BYTES)
    ending, oom = _run_one(slot, request, limits=limits, fds=fds, sinks=[output, report], time_s=time_s)
    failure = failure_of(ending, oom=oom, limits=limits, sinks=[output], record=record_of(report))
    return Run(failure, output=bytes(output.data))


def run_call(slot: Slot, *, program: str, function: str, arguments: list[Any], limits: Limits, time_s: float) -> Run:
    """Calls one function of the program; the value is of exact builtin types, or an `Opaque`.

    Raises:
        InfraError: the sandbox failed; nothing is known about the program.
    """
    report_read, report_write = os.pipe()
    request = {
        "role": "program",
        "mode": "function",
        "program": program,
        "function": function,
        "arguments": values.Encoder().encode(arguments),
    }
    report = Sink(report_read, limits.output_kb * 1024)
    ending, oom = _run_one(slot, request, limits=limits, fds={"channel": report_write}, sinks=[report], time_s=time_s)
    record = record_of(report)
    failure = failure_of(ending, oom=oom, limits=limits, sinks=[report], record=record)
    if failure is None and "value" not in record:
        failure = "runtime_error"
    if failure is not None:
        return Run(failure)
    try:
        return Run(None, value=values.Decoder().decode(record["value"]))
    except ValueError:
        return Run("wrong_answer")


def _run_one(
    slot: Slot, request: dict[str, Any], *, limits: Limits, fds: dict[str, int], sinks: list[Sink], time_s: float
) -> tuple[Ending, bool]:
    deadline = time.monotonic() + time_s + START_ALLOWANCE_S
    kills_before = num_oom_kills(slot)
    watched = False
    try:
        job = slot.launch(request, limits=limits, fds=fds)
        watched = True
    finally:
        for handle in fds.values():
            os.close(handle)
        if not watched:
            for sink in sinks:
                os.close(sink.handle)
    ending = slot.watch({job}, sinks=sinks, deadline=deadline)[job]
    return ending, ending.status is not None and ending.status != 0 and num_oom_kills(slot) > kills_before


def num_oom_kills(slot: Slot) -> int:
    if slot.group is None:
        return 0
    try:
        return slot.group.num_oom_kills()
    except OSError as fault:
        raise InfraError(f"cannot read the control group: {fault}") from fault


def record_of(report: Sink) -> dict[str, Any]:
    if not report.data.endswith(b"\n"):
        return {}
    try:
        record = values.load_line(bytes(report.data))
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def failure_of(
    ending: Ending, *, oom: bool, limits: Limits, sinks: list[Sink], record: dict[str, Any]
) -> Status | None:
    """Why a process that ran under these limits has no answer; None if it ended well."""
    if any(sink.overflowed for sink in sinks):
        return "output_limit"
    if ending.status is None:
        return "timeout"
    if oom:
        return "memory_limit"
    fault = record.get("fault")
    if fault == "compile":
        return "compile_error"
    if fault is not None:
        return "memory_limit" if record.get("type") == "MemoryError" else "runtime_error"
    if os.WIFSIGNALED(ending.status):
        number = os.WTERMSIG(ending.status)
        used_up = number == signal.SIGKILL and ending.cpu_s >= (limits.cpu_s or limits.time_limit_s)
        return "timeout" if number == signal.SIGXCPU or used_up else "runtime_error"
    return "runtime_error" if ending.status != 0 else None
