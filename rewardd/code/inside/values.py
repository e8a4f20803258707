"""The encoding in which results leave the program's process: data only, judged by whoever decodes it.

A message is JSON of depth at most four: `[code, nodes]`. A code is a scalar as itself (null, bool, str, 64-bit int)
or a tagged list: `["i", hex]`, `["f", repr]`, `["c", re, im]`, `["b", hex]`, `["r", index]` (a container of `nodes`)
or `["o", ...]` (an opaque object, described by the sender's hook). A node is `[tag, codes]` with tag l(ist), t(uple),
s(et), z (frozenset), d(ict, keys and values in turn), y (bytearray) or `["n", class, codes]` (an instance's
attributes in turn). Flat tables keep deep structures (linked lists) off the C stack, and cycles are representable.
Only exact builtin types are data: an instance of a subclass, which may lie about itself, is opaque.
"""

from __future__ import annotations

from collections.abc import Callable
from json import JSONDecodeError, JSONDecoder, JSONEncoder
from typing import Any, Final

Hook = Callable[[Any], Any]

MAX_NODES: Final = 4_000_000
_INT64: Final = 1 << 63
_encode_json = JSONEncoder(separators=(",", ":"), check_circular=False).encode
_decode_json = JSONDecoder().decode
_TAGS: Final[dict[Any, str]] = {list: "l", tuple: "t", set: "s", frozenset: "z", dict: "d"}


class Opaque:
    """Stands for an object that is not data, where the receiver has no use for it; equal to nothing else."""

    def __init__(self, *, type_name: str) -> None:
        self.type_name = type_name

    def __repr__(self) -> str:
        return f"<opaque {self.type_name}>"


def _default_opaque(value: Any) -> Any:
    return ["o", type(value).__name__]


class Encoder:
    """Turns a value into a message.

    Args:
        opaque: hook that describes an object that is not data as a JSON list starting with "o".
        node_classes: names of classes whose instances travel as their attributes.
    """

    def __init__(self, *, opaque: Hook = _default_opaque, node_classes: frozenset[str] = frozenset()) -> None:
        self._opaque = opaque
        self._node_classes = node_classes

    def encode(self, value: Any) -> list[Any]:
        """`[code, nodes]`, ready for JSON."""
        self._nodes: list[Any] = []
        self._pending: list[Any] = []
        self._seen: dict[int, int] = {}
        code = self._code(value)
        position = 0
        while position < len(self._pending):
            self._fill(self._pending[position], self._nodes[position])
            position += 1
        nodes = self._nodes
        del self._nodes, self._pending, self._seen
        return [code, nodes]

    def _fill(self, value: Any, node: list[Any]) -> None:
        kind = type(value)
        if kind is dict:
            items: list[Any] = []
            for key, item in value.items():
                items.append(key)
                items.append(item)
        elif kind in _TAGS:
            items = list(value)
        else:
            items = []
            for key, item in value.__dict__.items():
                items.append(key)
                items.append(item)
        code = self._code
        node.append([item if type(item) is str else code(item) for item in items])

    def _code(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_INT64 <= value < _INT64 else ["i", hex(value)]
        if kind is float:
            return ["f", repr(value)]
        if kind is bytes:
            return ["b", value.hex()]
        if kind is complex:
            return ["c", repr(value.real), repr(value.imag)]
        if kind in _TAGS:
            return self._refer(value, [_TAGS[kind]])
        if kind is bytearray:
            return ["y", value.hex()]
        if kind.__name__ in self._node_classes and type(getattr(value, "__dict__", None)) is dict:
            return self._refer(value, ["n", kind.__name__])
        return self._opaque(value)

    def _refer(self, value: Any, node: list[Any]) -> list[Any]:
        # Immutable containers are written out anew each time, so that a node only needs immutables of higher index.
        shared = node[0] not in "tz"
        index = self._seen.get(id(value)) if shared else None
        if index is None:
            index = len(self._nodes)
            if index >= MAX_NODES:
                raise ValueError("value has too many parts")
            self._nodes.append(node)
            self._pending.append(value)
            if shared:
                self._seen[id(value)] = index
        return ["r", index]


class Decoder:
    """Builds a value of exact builtin types from a message that may be hostile.

    Args:
        opaque: hook for `["o", ...]` codes.
        node_classes: classes to rebuild instances of, by name; an unknown name becomes an `Opaque`.
    """

    def __init__(self, *, opaque: Hook | None = None, node_classes: dict[str, type] | None = None) -> None:
        self._opaque = opaque or (lambda code: Opaque(type_name=str(code[1]) if len(code) > 1 else "?"))
        self._node_classes = {} if node_classes is None else node_classes

    def decode(self, message: Any) -> Any:
        """Raises `ValueError` for anything that is not a well-formed message."""
        try:
            root, self._table = message
            self._built = [self._begin(node) for node in self._table]
            for index in range(len(self._table) - 1, -1, -1):
                if self._table[index][0] in "tz":
                    items = self._items(self._table[index][1])
                    self._built[index] = tuple(items) if self._table[index][0] == "t" else frozenset(items)
            for index, node in enumerate(self._table):
                self._finish(self._built[index], node)
            return self._value(root)
        except (TypeError, KeyError, IndexError, AttributeError, OverflowError) as fault:
            raise ValueError(f"malformed value: {fault}") from None

    def _begin(self, node: list[Any]) -> Any:
        tag = node[0]
        if tag == "n":
            kind = self._node_classes.get(node[1])
            return Opaque(type_name=str(node[1])) if kind is None else object.__new__(kind)
        makers: dict[str, Any] = {"l": list, "d": dict, "s": set}
        return None if tag in "tz" else makers[tag]()

    def _items(self, codes: list[Any]) -> list[Any]:
        value = self._value
        return [code if type(code) is str else value(code) for code in codes]

    def _finish(self, built: Any, node: list[Any]) -> None:
        tag = node[0]
        if tag in "tz" or type(built) is Opaque:
            return
        items = self._items(node[-1])
        if tag == "l":
            built.extend(items)
        elif tag == "s":
            built.update(items)
        elif tag == "d":
            built.update(zip(items[::2], items[1::2], strict=True))
        else:
            for name, item in zip(items[::2], items[1::2], strict=True):
                object.__setattr__(built, str(name), item)

    def _value(self, code: Any) -> Any:
        if type(code) is not list:
            if code is None or type(code) in (bool, str, int):
                return code
            raise ValueError("malformed value: unexpected scalar")
        tag = code[0]
        if tag == "r":
            if type(code[1]) is not int or code[1] < 0:
                raise ValueError("malformed value: bad reference")
            return self._built[code[1]]
        if tag == "i":
            return int(code[1], 16)
        if tag == "f":
            return float(code[1])
        if tag == "c":
            return complex(float(code[1]), float(code[2]))
        if tag == "b":
            return bytes.fromhex(code[1])
        if tag == "y":
            return bytearray.fromhex(code[1])
        if tag == "o":
            return self._opaque(code)
        raise ValueError(f"malformed value: tag {tag!r}")


def dump_line(record: Any) -> bytes:
    """One record as one line of ASCII JSON."""
    return _encode_json(record).encode() + b"\n"


def load_line(line: bytes) -> Any:
    """Raises `ValueError` for anything but one JSON value, however nested or long its numbers are."""
    try:
        return _decode_json(line.decode())
    except (JSONDecodeError, UnicodeDecodeError, RecursionError, ValueError) as fault:
        raise ValueError(f"malformed record: {type(fault).__name__}") from None
