"""Assert-style tests: the test code runs in a process of its own, the program in another, values pass between them."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any, Final

from rewardd.code.execution import (
    REPORT_BYTES,
    START_ALLOWANCE_S,
    Status,
    failure_of,
    memory_file,
    num_oom_kills,
    record_of,
)
from rewardd.code.inside import units, values
from rewardd.code.limits import Limits
from rewardd.code.slot import Ending, InfraError, Sink, Slot

_STATUSES: Final[tuple[Status, ...]] = ("wrong_answer", "runtime_error", "memory_limit")
_MIN_SESSION_S: Final = 0.05


class TestsBroken(ValueError):
    """The test code cannot run at all, whatever the program: the data's fault."""

    __test__ = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checked assert test set and how many pass records a full pass takes."""

    tests: dict[str, Any]
    num_units: int


@dataclasses.dataclass
class _Session:
    """What one pair of processes reported.

    Attributes:
        statuses: of the units that were decided.
        begun: unit that was running when the session ended.
        state: last word of the test process ("done", "stopped", "gone", "failed", "broken"), "" if it said none.
    """

    statuses: dict[int, Status] = dataclasses.field(default_factory=dict)
    begun: int | None = None
    ready: bool = False
    state: str = ""
    status: Status = "runtime_error"
    text: str = ""


def plan(tests: Mapping[str, Any]) -> Plan:
    """Raises `ValueError` for a test set that asserts nothing or is not Python."""
    wanted = {
        key: tests[key]
        for key in ("assert_case", "test_code", "entry_point", "import_prefix")
        if tests.get(key) is not None
    }
    return Plan(wanted, units.parse(wanted).num_units)


def run(slot: Slot, plan: Plan, *, program: str, limits: Limits, early_exit: bool) -> tuple[list[Status], bool]:
    """Statuses of all units in order, and whether the total time ran out.

    A unit passes only by a record of the test process that it passed. A program that ends or hangs fails the unit it
    was in; the rest go on with a new pair of processes.

    Raises:
        TestsBroken: the test code cannot be run.
        InfraError: the sandbox failed.
    """
    statuses: list[Status] = ["not_run"] * plan.num_units
    deadline = time.monotonic() + limits.total_s
    first = 0
    while first < plan.num_units:
        if deadline - time.monotonic() < _MIN_SESSION_S:
            return statuses, True
        session = _run_session(
            slot, plan, program=program, limits=limits, first=first, early_exit=early_exit, deadline=deadline
        )
        if session.state == "broken":
            raise TestsBroken(session.text)
        for number, status in session.statuses.items():
            statuses[number] = status
        if session.state == "done":
            break
        if not session.ready or session.state == "failed":
            # The program does not load, or the code around the units failed on it: no later unit can do better.
            for number in range(first, plan.num_units):
                if statuses[number] == "not_run":
                    statuses[number] = session.status
            break
        if session.begun is not None:
            statuses[session.begun] = session.status
        decided = [number for number, status in enumerate(statuses) if status != "not_run"]
        if early_exit or not decided or max(decided) < first:
            if not decided:
                statuses[first] = session.status
            break
        first = max(decided) + 1
    return statuses, False


def _run_session(
    slot: Slot, plan: Plan, *, program: str, limits: Limits, first: int, early_exit: bool, deadline: float
) -> _Session:
    session = _Session()
    per_process = dataclasses.replace(limits, cpu_s=limits.total_s)
    records_read, records_write = os.pipe()
    report_read, report_write = os.pipe()
    program_end, tests_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    prefix = plan.tests.get("import_prefix") or ""
    served = {
        "role": "program",
        "mode": "serve",
        "program": program,
        "prefix": prefix,
        "class_names": sorted(units.parse(plan.tests).class_names),
    }
    # The tests hold expected values: they pass the fork server, the program's ancestor, only as a descriptor.
    tested = {"role": "tests", "mode": "tests", "first": first, "early_exit": early_exit}
    tests_file = memory_file(json.dumps(plan.tests).encode())
    position = 0

    def unit_deadline() -> float:
        return min(deadline, time.monotonic() + limits.time_limit_s)

    def read_records(sink: Sink) -> float | None:
        nonlocal position
        later = None
        while (end := sink.data.find(b"\n", position)) >= 0:
            record = values.load_line(bytes(sink.data[position:end]))
            position = end + 1
            later = unit_deadline() if _note(session, record, plan.num_units) else later
        return later

    records = Sink(records_read, limits.output_kb * 1024, on_data=read_records)
    report = Sink(report_read, REPORT_BYTES)
    kills_before = num_oom_kills(slot)
    launched = False
    try:
        program_job = slot.launch(
            served, limits=per_process, fds={"channel": report_write, "link": program_end.fileno()}
        )
        tests_job = slot.launch(
            tested, limits=per_process, fds={"channel": records_write, "link": tests_end.fileno(), "tests": tests_file}
        )
        launched = True
    finally:
        for end in (program_end, tests_end):
            end.close()
        for handle in (tests_file, records_write, report_write, *(() if launched else (records_read, report_read))):
            os.close(handle)
    endings = slot.watch(
        {program_job, tests_job},
        sinks=[records, report],
        leader=tests_job,
        deadline=unit_deadline() + START_ALLOWANCE_S,
    )
    read_records(records)
    _conclude(
        session,
        endings[program_job],
        endings[tests_job],
        report,
        limits=per_process,
        oom=num_oom_kills(slot) > kills_before,
    )
    return session


def _note(session: _Session, record: Any, num_units: int) -> bool:
    """Takes in one record of the (trusted) test process; True if it starts a new time limit."""
    state = record["state"]
    number = record.get("unit")
    if number is None:
        if state == "ready":
            session.ready = True
            return True
        session.state = state
        session.text = record.get("text", "")
        session.status = record.get("status", "runtime_error")
        return False
    assert 0 <= number < num_units
    if state == "begin":
        session.begun = number
        return True
    if state == "passed":
        # A failure of the same unit, should it run twice, stands.
        session.statuses.setdefault(number, "passed")
        session.begun = None
    elif state == "failed":
        session.statuses[number] = record["status"] if record["status"] in _STATUSES else "wrong_answer"
        session.begun = None
    return False


def _conclude(session: _Session, program: Ending, tests: Ending, report: Sink, *, limits: Limits, oom: bool) -> None:
    """Finds the cause where the session ended before its time."""
    if session.state in ("done", "broken") or (session.state == "failed" and session.ready):
        return
    if session.begun is None and session.statuses and session.state == "stopped":
        return
    record = record_of(report)
    if record.get("fault") == "prefix":
        session.state, session.text = "broken", f"import_prefix: {record.get('text')}"
        return
    if tests.status is None and program.status is None:
        session.status = "memory_limit" if oom else "timeout"
        return
    if tests.status is not None and tests.status != 0 and session.state == "":
        raise InfraError(f"the test process ended with wait status {tests.status}")
    session.status = failure_of(program, oom=oom, limits=limits, sinks=[report], record=record) or "runtime_error"
    if program.status is None and session.status == "timeout":
        # It was killed because the tests had ended, not for its time.
        session.status = "runtime_error"
