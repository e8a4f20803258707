"""The tests' process: runs the test code and reports each unit on a pipe that the program never holds."""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
import types
from typing import Any, Final, NoReturn

from . import pytest_shim, units, values
from .link import Link, LinkClosed
from .remote import Peer, ProgramFault, RemoteCallable

_FILE: Final = "tests.py"


class Stop(BaseException):
    """Ends the run after a failure that makes going on pointless."""


class Reporter:
    """`__unit__` in the instrumented code.

    Args:
        first: units before it were reported by an earlier run.
    """

    def __init__(self, handle: int, *, first: int, early_exit: bool) -> None:
        self._handle = handle
        self._first = first
        self._early_exit = early_exit
        self.current: int | None = None

    def write(self, **record: Any) -> None:
        line = memoryview(values.dump_line(record))
        while line:
            line = line[os.write(self._handle, line) :]

    def begin(self, number: int) -> bool:
        if number < self._first:
            return False
        self.current = number
        self.write(unit=number, state="begin")
        return True

    def passed(self, number: int) -> None:
        self.write(unit=number, state="passed")
        self.current = None

    def failed(self, number: int, fault: BaseException) -> None:
        if isinstance(fault, Stop):
            raise fault
        gone = isinstance(fault, LinkClosed)
        self.write(unit=number, state="gone" if gone else "failed", status=_status(fault))
        self.current = None
        if gone or self._early_exit:
            raise Stop


def _status(fault: BaseException) -> str:
    if isinstance(fault, ProgramFault | LinkClosed | SystemExit):
        return "memory_limit" if isinstance(fault, MemoryError) else "runtime_error"
    if isinstance(fault, NameError):
        return "runtime_error"
    return "wrong_answer"


class _Missing:
    """A name that the tests want of the program and it does not define, though the tests' side knows another."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NameError(f"the program does not define {self._name!r}")

    def __getattr__(self, _: str) -> NoReturn:
        raise NameError(f"the program does not define {self._name!r}")


class _Solution(types.ModuleType):
    """What `import solution` gives: the names of the program, by proxy."""

    def __init__(self, proxies: dict[str, Any]) -> None:
        super().__init__("solution")
        self.__dict__.update(proxies)
        self.__all__ = [name for name in proxies if not name.startswith("_")]


class Names:
    """Which names of the tests come from the program, and which the program must not replace.

    The entry point and what is imported from `solution` are the program's. So is what nothing else supplies. A name
    that a builtin or the prelude supplies (`sum`, `gcd`) is the program's only if the tests would not use the program
    otherwise; else a program could bring its own `all` or `sorted` into the judgement.
    """

    def __init__(self, suite: units.Suite, defined: dict[str, Any], prelude: dict[str, Any]) -> None:
        self._defined = defined
        explicit = set(suite.imported)
        if suite.entry_point:
            tree = ast.parse(suite.entry_point)
            explicit |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        supplied = set(dir(builtins)) | set(prelude)
        wanted = explicit | (set(suite.free_names) - supplied)
        if not wanted:
            offered = {name for name in suite.free_names if not isinstance(prelude.get(name), types.ModuleType)}
            named = {name for name in offered if name not in dir(builtins)}
            wanted = named or {name for name in offered if name in defined}
        self.wanted = frozenset(wanted)

    def bind(self, namespace: dict[str, Any]) -> None:
        for name in self.wanted:
            if name in self._defined:
                namespace[name] = self._defined[name]
            elif name in namespace or hasattr(builtins, name):
                namespace[name] = _Missing(name)


def _proxies(described: Any, peer: Peer, wanted_values: set[str]) -> dict[str, Any]:
    proxies: dict[str, Any] = {}
    for name, kind, bases in described:
        if kind == "exception":
            proxies[name] = peer.exception_class([str(base) for base in bases])
        elif kind == "value" and name in wanted_values:
            proxies[name] = peer.ask("value", str(name), [])
        else:
            proxies[name] = RemoteCallable(peer, str(name), str(name))  # type: ignore[arg-type]
    return proxies


def _call_function(namespace: dict[str, Any], owner: str | None, name: str) -> None:
    if owner is None:
        for named in pytest_shim.calls(namespace[name]):
            namespace[name](**named)
        return
    kind = namespace[owner]
    if "unittest" in sys.modules and issubclass(kind, sys.modules["unittest"].TestCase):
        import unittest

        case = kind(name)
        outcome = unittest.TestResult()
        case.run(outcome)
        problem = next(iter([*outcome.failures, *outcome.errors]), None)
        if problem is not None:
            raise AssertionError(problem[1])
        if outcome.testsRun != 1 or outcome.skipped or outcome.unexpectedSuccesses:
            raise AssertionError("the test did not run")
        return
    instance = kind()
    if hasattr(instance, "setup_method"):
        instance.setup_method()
    method = getattr(instance, name)
    for named in pytest_shim.calls(getattr(kind, name)):
        method(**named)


class Runner:
    """Runs a suite against a program behind a link."""

    def __init__(self, suite: units.Suite, reporter: Reporter, link: Link, prelude: dict[str, Any]) -> None:
        self._suite = suite
        self._reporter = reporter
        self._classes: dict[str, type] = {}
        self._peer = Peer(link, class_names=suite.class_names, classes=self._classes)
        self._prelude = prelude

    def _namespace(self, names: Names) -> dict[str, Any]:
        namespace: dict[str, Any] = {**self._prelude, "__name__": "tests", units.REPORTER: self._reporter}
        exec(compile(self._suite.prefix, "prefix.py", "exec", dont_inherit=True), namespace)
        self._learn_classes(namespace)
        names.bind(namespace)
        return namespace

    def _learn_classes(self, namespace: dict[str, Any]) -> None:
        for name in self._suite.class_names:
            if isinstance(namespace.get(name), type):
                self._classes[name] = namespace[name]

    def run(self, described: Any) -> None:
        suite = self._suite
        proxies = _proxies(described, self._peer, set(suite.free_names | suite.imported))
        names = Names(suite, proxies, self._prelude)
        sys.modules["solution"] = _Solution(proxies)
        sys.modules["pytest"] = pytest_shim.module()
        by_entry = len(suite.modules) > 1 or (
            suite.num_units == 1
            and not suite.functions
            and suite.whole is None
            and suite.first_function == 0
            and suite.entry_point is None
        )
        if by_entry:
            for number, tree in enumerate(suite.modules):
                self._unit(number, lambda tree=tree: self._run_module(tree, self._namespace(names)))
            return
        namespace = self._namespace(names)
        tree = suite.modules[0]
        if suite.whole is not None and suite.entry_point is None:
            self._unit(suite.whole, lambda: self._run_module(tree, namespace))
            return
        self._run_module(tree, namespace)
        if suite.entry_point is not None:
            entry = eval(compile(suite.entry_point, _FILE, "eval", dont_inherit=True), namespace)
            if suite.whole is not None:
                self._unit(suite.whole, lambda: namespace["check"](entry))
            else:
                namespace["check"](entry)
            return
        for number, (owner, name) in enumerate(suite.functions, suite.first_function):
            self._unit(number, lambda owner=owner, name=name: _call_function(namespace, owner, name))

    def _run_module(self, tree: ast.Module, namespace: dict[str, Any]) -> None:
        exec(compile(tree, _FILE, "exec", dont_inherit=True), namespace)
        self._learn_classes(namespace)

    def _unit(self, number: int, action: Any) -> None:
        if not self._reporter.begin(number):
            return
        try:
            action()
        except BaseException as fault:
            self._reporter.failed(number, fault)
        else:
            self._reporter.passed(number)


def run(
    tests_file: int, *, channel: int, link_handle: int, first: int, early_exit: bool, prelude: dict[str, Any]
) -> NoReturn:
    """Waits for the program, runs the units from `first` on, reports, ends the process."""
    reporter = Reporter(channel, first=first, early_exit=early_exit)
    link = Link(link_handle)
    try:
        ready = link.receive()
        reporter.write(state="ready")
        with open(tests_file, "rb") as file:
            suite = units.parse(json.load(file))
        Runner(suite, reporter, link, prelude).run(ready[1])
        reporter.write(state="done")
    except Stop:
        reporter.write(state="stopped")
    except LinkClosed:
        reporter.write(state="gone", status="runtime_error")
    except ImportError as fault:
        ours = not isinstance(fault, ProgramFault) and fault.name != "solution"
        reporter.write(state="broken" if ours else "failed", status="runtime_error", text=str(fault)[:200])
    except BaseException as fault:
        reporter.write(state="failed", status=_status(fault), text=f"{type(fault).__name__}: {str(fault)[:200]}")
    os._exit(0)
