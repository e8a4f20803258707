"""Splits test code into units that are reported one by one.

The trusted parent counts the units of a test set and the test process runs them; both call `parse` on the same data.
A unit is one top-level statement that holds an assert (of the module, or of `check`), one pytest function, or one
entry of `assert_case`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

REPORTER: Final = "__unit__"
_SOLUTION: Final = "solution"
_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass
class Suite:
    """A parsed test set.

    Attributes:
        modules: code to run in order, each in a fresh copy of the base names.
        functions: pytest-style functions to call after the (only) module, as (class name or None, function name).
        entry_point: expression for the argument of `check`, if `check` is to be called.
        whole: unit number of running the module (or calling `check`) as such, where it cannot be split.
        num_units: how many pass records make a full pass.
        free_names: names that the tests use but do not bind.
        imported: names that the tests import from the module `solution`.
        class_names: classes that the tests and their prefix define; their instances travel as attributes.
    """

    modules: list[ast.Module] = field(default_factory=list)
    functions: list[tuple[str | None, str]] = field(default_factory=list)
    first_function: int = 0
    entry_point: str | None = None
    whole: int | None = None
    prefix: str = ""
    num_units: int = 0
    free_names: frozenset[str] = frozenset()
    imported: frozenset[str] = frozenset()
    class_names: frozenset[str] = frozenset()


def _parse(source: Any, what: str) -> ast.Module:
    if not isinstance(source, str):
        raise ValueError(f"{what} is {type(source).__name__}, not text")
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:
        raise ValueError(f"{what} is not Python: {fault}") from None


def _here(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what is below it in the same scope."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _SCOPES):
            yield from _here(child)


def _asserts(node: ast.stmt) -> bool:
    return not isinstance(node, _SCOPES) and any(isinstance(part, ast.Assert) for part in _here(node))


def _splittable(body: list[ast.stmt]) -> bool:
    units = [node for node in body if _asserts(node)]
    return bool(units) and not any(
        isinstance(part, ast.Return | ast.Yield | ast.YieldFrom | ast.Await) for node in body for part in _here(node)
    )


def _wrap(body: list[ast.stmt], first: int) -> tuple[list[ast.stmt], int]:
    """Replaces each asserting statement by one that reports; gives the next free unit number."""
    wrapped: list[ast.stmt] = []
    number = first
    for node in body:
        if not _asserts(node):
            wrapped.append(node)
            continue
        shell = ast.parse(
            f"if {REPORTER}.begin({number}):\n"
            f"    try:\n        pass\n"
            f"    except BaseException as __fault__:\n        {REPORTER}.failed({number}, __fault__)\n"
            f"    else:\n        {REPORTER}.passed({number})\n"
        ).body[0]
        assert isinstance(shell, ast.If) and isinstance(shell.body[0], ast.Try)
        shell.body[0].body = [node]
        wrapped.append(ast.fix_missing_locations(shell))
        number += 1
    return wrapped, number


def _bound_and_used(trees: list[ast.Module]) -> tuple[set[str], set[str]]:
    bound: set[str] = set()
    used: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                bound.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                bound.add(node.name)
    return bound, used


def _imports_of_solution(trees: list[ast.Module]) -> set[str]:
    names: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == _SOLUTION:
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.Import) and any(alias.name == _SOLUTION for alias in node.names):
                names.add("*")
    return names


def _test_functions(tree: ast.Module) -> list[tuple[str | None, str]]:
    found: list[tuple[str | None, str]] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            found.append((None, node.name))
        elif isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or _is_test_case(node)):
            found += [
                (node.name, method.name)
                for method in node.body
                if isinstance(method, ast.FunctionDef) and method.name.startswith("test")
            ]
    return found


def _is_test_case(node: ast.ClassDef) -> bool:
    return any("TestCase" in ast.unparse(base) for base in node.bases)


def _is_call_of_check(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "check"
    )


def _parse_cases(cases: Any, suite: Suite) -> None:
    if not isinstance(cases, list) or not cases:
        raise ValueError("assert_case is not a list of asserts with at least one entry")
    for index, source in enumerate(cases):
        tree = _parse(source, f"assert_case[{index}]")
        if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
            raise ValueError(f"assert_case[{index}] asserts nothing")
        suite.modules.append(tree)
    suite.num_units = len(cases)


def _parse_module(tests: Mapping[str, Any], suite: Suite) -> None:
    tree = _parse(tests["test_code"], "test_code")
    suite.modules = [tree]
    check = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    entry = tests.get("entry_point")
    if check is not None and entry is not None:
        if not isinstance(entry, str) or not entry.strip():
            raise ValueError("entry_point is not the name of a function")
        _parse(entry, "entry_point")
        suite.entry_point = entry.strip()
        tree.body = [node for node in tree.body if not _is_call_of_check(node)]
        if _splittable(check.body):
            check.body, suite.num_units = _wrap(check.body, 0)
        else:
            suite.whole, suite.num_units = 0, 1
        return
    suite.functions = _test_functions(tree)
    tree.body, suite.first_function = _wrap(tree.body, 0)
    suite.num_units = suite.first_function + len(suite.functions)
    if suite.num_units == 0:
        if check is not None and not any(_is_call_of_check(node) for node in tree.body):
            raise ValueError("test_code defines check() but there is no entry_point to give it")
        suite.whole, suite.num_units = 0, 1


def _verifies(tree: ast.Module) -> bool:
    """Whether anything in the code can fail on purpose: an assert, a raise, or a unittest assertion."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert | ast.Raise):
            return True
        if isinstance(node, ast.Attribute) and (node.attr.startswith("assert") or node.attr == "raises"):
            return True
    return False


def parse(tests: Mapping[str, Any]) -> Suite:
    """Raises `ValueError` with one line for test sets that are not Python or assert nothing."""
    suite = Suite(prefix=tests.get("import_prefix") or "")
    prefix = _parse(suite.prefix, "import_prefix")
    if "test_code" in tests:
        if not _verifies(_parse(tests["test_code"], "test_code")):
            raise ValueError("test_code asserts nothing")
        _parse_module(tests, suite)
    elif "assert_case" in tests:
        _parse_cases(tests["assert_case"], suite)
    else:
        raise ValueError("assert tests need assert_case or test_code")
    trees = [*suite.modules, *([_parse(suite.entry_point, "entry_point")] if suite.entry_point else [])]
    bound, used = _bound_and_used([*trees, prefix])
    suite.free_names = frozenset(used - bound - {REPORTER, "__fault__"})
    suite.imported = frozenset(_imports_of_solution(trees))
    if not suite.free_names and not suite.imported:
        raise ValueError("the tests do not use the program")
    classes = (node.name for tree in (*trees, prefix) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    suite.class_names = frozenset(classes)
    return suite
