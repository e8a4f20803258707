"""Which part of a response is the program."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from typing import Final

_FENCE: Final = re.compile(r"^([ \t]*(?:>[ \t]?)?)(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*$")
_PYTHON_TAGS: Final = frozenset({"python", "python3", "py", "py3", "python2", "cpython", "pypy", "pypy3"})
_THINK_OPEN: Final = "<think>"
_THINK_CLOSE: Final = "</think>"
_ALLOWED_UNTAGGED: Final = ""


@dataclass
class _Block:
    tag: str
    lines: list[str] = field(default_factory=list)


def _answer_part(response: str) -> str:
    _, closing, after = response.rpartition(_THINK_CLOSE)
    if closing:
        return after
    # Cut off while still thinking: there is no answer yet.
    return "" if response.lstrip().startswith(_THINK_OPEN) else response


def _blocks(text: str) -> list[_Block]:
    """Closed fenced blocks in order. Only a line that is nothing but the fence closes a block."""
    blocks: list[_Block] = []
    current: _Block | None = None
    fence = ""
    for line in text.split("\n"):
        match = _FENCE.match(line)
        if current is None:
            if match:
                fence = match[2]
                tag = match[3].strip("{}.").split(",")[0].lower()
                current = _Block(tag)
        elif match and match[2][0] == fence[0] and len(match[2]) >= len(fence) and not match[3]:
            blocks.append(current)
            current = None
        else:
            current.lines.append(line)
    if current is not None and current.lines:
        last = current.lines[-1].rstrip() or (current.lines[-2].rstrip() if len(current.lines) > 1 else "")
        if last.endswith(fence):
            # The closing fence was put behind the last statement.
            while not current.lines[-1].strip():
                current.lines.pop()
            current.lines[-1] = last[: -len(fence)]
            blocks.append(current)
    return blocks


def extract_program(response: str) -> str | None:
    """The program of a response: its last closed Python block after the thinking part, else its last untagged one.

    Blocks in another language do not count. Windows line ends become plain ones and common indentation goes.

    Returns:
        The source text, or None where there is no such block.
    """
    text = _answer_part(response).replace("\r\n", "\n").replace("\r", "\n")
    blocks = [block for block in _blocks(text) if any(line.strip() for line in block.lines)]
    for accepted in (_PYTHON_TAGS, frozenset({_ALLOWED_UNTAGGED})):
        for block in reversed(blocks):
            if block.tag in accepted:
                return textwrap.dedent("\n".join(block.lines)) + "\n"
    return None
