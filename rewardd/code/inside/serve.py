"""The program's side of an assert test: loads the program and answers the test process's calls."""

from __future__ import annotations

import builtins
import operator
import os
from collections.abc import Callable
from typing import Any, Final, NoReturn

from . import program, values
from .link import Link, LinkClosed

_OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
    "bool": bool,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "contains": operator.contains,
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "neg": operator.neg,
    "invert": operator.invert,
    "setattr": setattr,
    "isinstance": isinstance,
    "get": getattr,
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None),
}


class _Classes(dict[str, type]):
    """Classes of the tests by name; one that the program does not know becomes an empty class of that name."""

    def get(self, name: str, default: Any = None) -> Any:
        found = self.setdefault(name, type(name, (), {}))
        return found


class Callback:
    """A function of the tests, as the program sees it."""

    def __init__(self, server: Servant, number: int) -> None:
        self._server = server
        self._number = number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._server.call_back(self._number, list(arguments), named)


class Servant:
    """Answers requests until the test process goes away."""

    def __init__(self, link: Link, *, namespace: dict[str, Any], class_names: frozenset[str]) -> None:
        self._link = link
        self._namespace = namespace
        self._objects: list[Any] = []
        self._handles: dict[int, int] = {}
        self._encoder = values.Encoder(opaque=self._describe, node_classes=class_names)
        classes = _Classes({name: namespace[name] for name in class_names if isinstance(namespace.get(name), type)})
        self._decoder = values.Decoder(opaque=self._resolve, node_classes=classes)

    def _describe(self, value: Any) -> list[Any]:
        number = self._handles.get(id(value))
        if number is None:
            number = self._handles[id(value)] = len(self._objects)
            self._objects.append(value)
        return ["o", number, type(value).__name__]

    def _resolve(self, code: list[Any]) -> Any:
        if code[1] == "program":
            return self._namespace[code[2]] if isinstance(code[2], str) else self._objects[code[2]]
        if code[1] == "tests":
            return Callback(self, code[2])
        if code[1] == "builtin":
            return getattr(builtins, code[2])
        raise ValueError(f"malformed reference {code[1]!r}")

    def call_back(self, number: int, arguments: list[Any], named: dict[str, Any]) -> Any:
        self._link.send(["callback", number, self._encoder.encode([arguments, named])])
        while True:
            message = self._link.receive()
            if message[0] == "result":
                return self._decoder.decode(message[1])
            if message[0] == "raised":
                raise RuntimeError(f"the caller's function raised {message[1]}")
            self._answer(message)

    def _perform(self, message: list[Any]) -> Any:
        kind, target, payload = message[0], message[1], message[2]
        if kind == "call":
            function = self._namespace[target] if isinstance(target, str) else self._objects[target]
            arguments, named = self._decoder.decode(payload)
            result = function(*arguments, **named)
            # A function without a result was called for what it does to its arguments.
            changed = self._encoder.encode([arguments, named]) if result is None else None
            return ["value", self._encoder.encode(result), changed]
        owner = self._namespace[target] if isinstance(target, str) else self._objects[target]
        operands = self._decoder.decode(payload)
        if kind == "value":
            return ["value", self._encoder.encode(owner), None]
        if kind == "risinstance":
            return ["value", self._encoder.encode(isinstance(operands[0], owner)), None]
        if kind.startswith("r_"):
            return ["value", self._encoder.encode(_OPERATIONS[kind[2:]](operands[0], owner)), None]
        return ["value", self._encoder.encode(_OPERATIONS[kind](owner, *operands)), None]

    def _answer(self, message: list[Any]) -> None:
        try:
            reply = self._perform(message)
        except LinkClosed:
            raise
        except BaseException as fault:
            names = [kind.__name__ for kind in type(fault).__mro__]
            try:
                text = str(fault)[:500]
            except BaseException:
                text = ""
            reply = ["fault", names, text]
        self._link.send(reply)

    def serve(self) -> NoReturn:
        try:
            while True:
                self._answer(self._link.receive())
        except LinkClosed:
            os._exit(0)


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if callable(value) else "value"


def run(
    source: str, *, channel: int, link_handle: int, prefix: str, class_names: list[str], prelude: dict[str, Any]
) -> NoReturn:
    """Loads the program as module `solution` (the tests' import prefix first) and serves it."""
    link = Link(link_handle)
    offered = dict(prelude)
    try:
        exec(compile(prefix, "prefix.py", "exec", dont_inherit=True), offered)
    except BaseException as fault:
        program.report(channel, {"fault": "prefix", "type": type(fault).__name__, "text": str(fault)[:200]})
        os._exit(1)
    namespace = program.load(source, channel, name="solution", prelude=offered)
    own = {
        name: value
        for name, value in namespace.items()
        if not name.startswith("__") and not (name in offered and offered[name] is value)
    }
    servant = Servant(link, namespace=namespace, class_names=frozenset(class_names))
    described = []
    for name, value in own.items():
        kind = _kind(value)
        bases = [base.__name__ for base in value.__mro__] if kind == "exception" else []
        described.append([name, kind, bases])
    link.send(["ready", described])
    servant.serve()
