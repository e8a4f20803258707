"""The reading position in a token list."""

from __future__ import annotations

from collections.abc import Callable

from rewardd.math.errors import TooComplex, Unparsed
from rewardd.math.lexer import END, Lexer, Token
from rewardd.math.nodes import Node

MAX_DEPTH = 40


class TokenReader:
    """Looks at, takes and expects tokens; counts the nesting of rules and open absolute bars."""

    def __init__(self, source: str) -> None:
        self.tokens = Lexer(source).tokens
        self.pos = 0
        self.depth = 0
        self.bars = 0
        self.in_set = False

    def peek(self, offset: int = 0) -> Token:
        index = self.pos + offset
        return self.tokens[index] if index < len(self.tokens) else END

    def take(self) -> Token:
        token = self.peek()
        self.pos += 1
        return token

    def at(self, *texts: str, kinds: tuple[str, ...] = ("op", "cmd", "sep")) -> bool:
        token = self.peek()
        return token.text in texts and token.kind in kinds

    def accept(self, text: str, kinds: tuple[str, ...] = ("op", "cmd")) -> bool:
        if self.at(text, kinds=kinds):
            self.pos += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text, ("op", "cmd", "esc")):
            raise Unparsed(f"expected {text!r}, found {self.peek().text!r}")

    def nested(self, rule: Callable[[], Node]) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooComplex("nesting")
        node = rule()
        self.depth -= 1
        return node
