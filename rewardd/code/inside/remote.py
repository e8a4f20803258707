"""The tests' side of the program: proxies whose results are values of exact builtin types.

The judgement stays here, out of the program's reach. An object of the program that is not data is only a handle. It
equals no value of the tests, and an operation that would show it a value of the tests (which may be the expected one)
must not turn it into a plain value: else an object "equal to everything", or one whose `x - 3` is always 0, would pass.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any, Final

from . import values
from .link import Link, LinkClosed

_PLAIN_ERROR: Final = "an object of the program does not combine with a value of the tests"
_ENDS_OF_ITERATION: Final = ("StopIteration", "StopAsyncIteration", "GeneratorExit")


class ProgramFault(Exception):
    """Marks exceptions that the program raised, as the tests see them."""


class Peer:
    """The program behind its link.

    Args:
        classes: classes that the tests define, by name, filled in as they come to exist.
    """

    def __init__(self, link: Link, *, class_names: frozenset[str], classes: dict[str, type]) -> None:
        self._link = link
        self._functions: list[Callable[..., Any]] = []
        self._encoder = values.Encoder(opaque=self._describe, node_classes=class_names)
        self._decoder = values.Decoder(opaque=self._resolve, node_classes=classes)
        self._exceptions: dict[str, type[BaseException]] = {}

    def _describe(self, value: Any) -> list[Any]:
        if type(value) in (RemoteObject, RemoteCallable):
            return ["o", "program", value._handle]
        name = getattr(value, "__name__", "")
        if isinstance(value, type) and getattr(builtins, name, None) is value:
            return ["o", "builtin", name]
        if callable(value):
            self._functions.append(value)
            return ["o", "tests", len(self._functions) - 1]
        return ["o", "builtin", "object"]

    def _resolve(self, code: list[Any]) -> Any:
        handle, name = code[1], code[2]
        if type(handle) is not int or type(name) is not str:
            raise ValueError("malformed handle")
        return RemoteObject(self, handle, name)

    def ask(self, kind: str, target: str | int, operands: list[Any]) -> Any:
        """Sends one request and serves call-backs until its answer comes; raises what the program raised."""
        self._link.send([kind, target, self._encoder.encode(operands)])
        while True:
            message = self._link.receive()
            try:
                if message[0] == "callback":
                    self._call_back(message)
                    continue
                if message[0] == "fault":
                    raise self._fault(message[1], message[2], in_next=kind == "next")
                result = self._decoder.decode(message[1])
                if kind == "call" and result is None and message[2] is not None:
                    update(operands, self._decoder.decode(message[2]))
                return result
            except (ValueError, IndexError, TypeError) as fault:
                if isinstance(fault, ProgramFault):
                    raise
                raise LinkClosed(f"malformed answer: {fault}") from None

    def _call_back(self, message: list[Any]) -> None:
        arguments, named = self._decoder.decode(message[2])
        try:
            result = self._functions[message[1]](*arguments, **named)
        except LinkClosed:
            raise
        except BaseException as fault:
            self._link.send(["raised", type(fault).__name__])
            return
        self._link.send(["result", self._encoder.encode(result)])

    def _fault(self, names: Any, text: Any, *, in_next: bool) -> BaseException:
        listed = [str(name) for name in names]
        if in_next and listed[:1] == ["StopIteration"]:
            return StopIteration()
        return self.exception_class(listed)(str(text))

    def exception_class(self, names: list[str]) -> type[BaseException]:
        """A local class for the program's exception: named alike, derived from its nearest builtin one."""
        key = "/".join(names)
        if key not in self._exceptions:
            base: type[BaseException] = Exception
            for name in reversed(names):
                if name in self._exceptions:
                    base = self._exceptions[name]
                found = getattr(builtins, name, None)
                # An exception that ends iterations could cut short a loop of the tests.
                if isinstance(found, type) and issubclass(found, BaseException) and name not in _ENDS_OF_ITERATION:
                    base = found
            marked = issubclass(base, Exception) and not issubclass(base, ProgramFault)
            bases: tuple[type, ...] = (ProgramFault, base) if marked else (base,)
            made = type(names[0] if names else "Exception", bases, {"__init__": _keep_text})
            self._exceptions[key] = made
            if names and not hasattr(builtins, names[0]):
                self._exceptions[names[0]] = made
        return self._exceptions[key]


def _keep_text(self: BaseException, *arguments: Any) -> None:
    self.args = arguments


def update(original: Any, changed: Any) -> None:
    """Gives the containers of `original` the contents of `changed`, in place, so that the tests' names see it."""
    pending = [(original, changed)]
    seen: set[int] = set()
    while pending:
        old, new = pending.pop()
        if id(old) in seen or type(old) is not type(new):
            continue
        seen.add(id(old))
        if type(old) in (list, tuple):
            pairs = list(zip(old, new, strict=False))
            if type(old) is list:
                old[:] = [a if _same_container(a, b) else b for a, b in pairs] + new[len(pairs) :]
            pending += pairs
        elif type(old) is dict:
            pairs = [(old[key], new[key]) for key in new if key in old]
            kept = {key: old[key] if key in old and _same_container(old[key], new[key]) else new[key] for key in new}
            old.clear()
            old.update(kept)
            pending += pairs
        elif type(old) in (set, bytearray):
            old.clear()
            if type(old) is set:
                old.update(new)
            else:
                old.extend(new)
        elif type(getattr(old, "__dict__", None)) is dict and type(old) not in (RemoteObject, RemoteCallable):
            pending.append((old.__dict__, new.__dict__))


def _same_container(old: Any, new: Any) -> bool:
    return type(old) is type(new) and (type(old) in (list, dict, set, tuple, bytearray) or hasattr(old, "__dict__"))


class RemoteObject:
    """An object of the program."""

    def __init__(self, peer: Peer, handle: int, name: str, *, built_as_class: bool = False) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_handle", handle)
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_built_as_class", built_as_class)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        return self._peer.ask("get", self._handle, [name])

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self._handle, [name, value])

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._peer.ask("call", self._handle, [list(arguments), named])

    def __instancecheck__(self, instance: Any) -> bool:
        return self._peer.ask("risinstance", self._handle, [instance]) is True

    def __iter__(self) -> Any:
        return self._peer.ask("iter", self._handle, [])

    def __next__(self) -> Any:
        return self._peer.ask("next", self._handle, [])

    def __len__(self) -> int:
        return self._exactly(int, self._peer.ask("len", self._handle, []))

    def __bool__(self) -> bool:
        return self._exactly(bool, self._peer.ask("bool", self._handle, []))

    def __str__(self) -> str:
        return self._exactly(str, self._peer.ask("str", self._handle, []))

    def __repr__(self) -> str:
        return self._exactly(str, self._peer.ask("repr", self._handle, []))

    def __enter__(self) -> Any:
        return self._peer.ask("enter", self._handle, [])

    def __exit__(self, *_: Any) -> None:
        self._peer.ask("exit", self._handle, [])

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("getitem", self._handle, [key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.ask("setitem", self._handle, [key, value])

    def __delitem__(self, key: Any) -> None:
        self._peer.ask("delitem", self._handle, [key])

    def __contains__(self, item: Any) -> bool:
        if not self._built_as_class and not _is_remote(item):
            raise TypeError(_PLAIN_ERROR)
        return self._exactly(bool, self._peer.ask("contains", self._handle, [item]))

    def __eq__(self, other: object) -> bool:
        if not _is_remote(other):
            return False
        return self._exactly(bool, self._peer.ask("eq", self._handle, [other]))

    def __hash__(self) -> int:
        return hash(self._handle)

    @staticmethod
    def _exactly(kind: type, value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"the program's object gave {type(value).__name__} where {kind.__name__} is due")
        return value

    def _combine(self, operation: str, other: Any) -> Any:
        result = self._peer.ask(operation, self._handle, [other])
        if not _is_remote(other) and not _is_remote(result):
            raise TypeError(_PLAIN_ERROR)
        return result

    def _unary(self, operation: str) -> Any:
        result = self._peer.ask(operation, self._handle, [])
        if not _is_remote(result):
            raise TypeError(_PLAIN_ERROR)
        return result


class RemoteCallable(RemoteObject):
    """A top-level function or class of the program, under its name in the tests.

    Only an instance of what the tests call by a class-like (capitalised) name is an object under test, whose `in` may
    be asked about the tests' values.
    """

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        result = self._peer.ask("call", self._handle, [list(arguments), named])
        if type(result) is RemoteObject and self._name[:1].isupper():
            object.__setattr__(result, "_built_as_class", True)
        return result


def _is_remote(value: Any) -> bool:
    return isinstance(value, RemoteObject)


def _add_operators() -> None:
    def binary(name: str) -> Callable[[Any, Any], Any]:
        return lambda self, other: self._combine(name, other)

    def comparison(name: str) -> Callable[[Any, Any], Any]:
        def compare(self: RemoteObject, other: Any) -> bool:
            if not _is_remote(other):
                raise TypeError(_PLAIN_ERROR)
            return bool(self._exactly(bool, self._peer.ask(name, self._handle, [other])))

        return compare

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
        setattr(RemoteObject, f"__{name}__", binary(name))
        setattr(RemoteObject, f"__r{name}__", binary(f"r_{name}"))
    for name in ("lt", "le", "gt", "ge"):
        setattr(RemoteObject, f"__{name}__", comparison(name))
    for name in ("neg", "invert"):
        setattr(RemoteObject, f"__{name}__", lambda self, name=name: self._unary(name))


_add_operators()
