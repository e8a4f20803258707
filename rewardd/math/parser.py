"""Recursive-descent parser from LaTeX or plain text to the tree of `nodes`. It never evaluates anything."""

from __future__ import annotations

from fractions import Fraction

from rewardd.math import units
from rewardd.math.errors import Hedge, TooComplex, Unparsed
from rewardd.math.formulas import FormulaParser
from rewardd.math.lexer import Token
from rewardd.math.nodes import (
    Builder,
    Congruence,
    Fn,
    Group,
    Listing,
    Mul,
    Named,
    NamedSet,
    Node,
    Num,
    Percent,
    Quantity,
    Ratio,
    Relation,
    SetOf,
    SetOp,
    Sym,
    mul,
)
from rewardd.math.reader import MAX_DEPTH
from rewardd.math.vocabulary import (
    FILLERS,
    RELATIONS,
    SET_OPS,
    STOP_WORDS,
)

_CLOSE = {")": ")", "]": "]", "rangle": ">"}


class Parser(FormulaParser):
    """One pass over the tokens of one answer: lists, statements, sets, intervals, units."""

    def answer(self) -> Node:
        """The whole text: items separated by commas, `and`, `or` or line breaks."""
        node = self.listing()
        if self.peek().kind != "end":
            raise Unparsed(f"unexpected {self.peek().text!r}")
        return node

    def listing(self) -> Node:
        items, joiners = [self.item()], set()
        while True:
            joiner = self.separator()
            if not joiner:
                break
            joiners.add(joiner)
            if self.peek().kind == "end":
                break
            items.append(self.item())
        if len(items) == 1:
            return items[0]
        order = [joiner for joiner in ("or", "and", ";", ",") if joiner in joiners]
        return Listing(tuple(items), order[0])

    def separator(self) -> str:
        """One or more separators in a row, the strongest of them; empty when there is none."""
        found = ""
        while True:
            token = self.peek()
            if token.kind == "sep":
                found = token.text if token.text in ("and", "or") or not found else found
            elif token.kind == "cmd" and token.text in ("lor", "vee"):
                found = "or"
            elif token.kind == "cmd" and token.text in ("land", "wedge"):
                found = "and"
            elif token.kind == "esc" and token.text == "\\":
                found = found or ","
            else:
                return found
            self.pos += 1

    def item(self) -> Node:
        while self.peek().kind == "word" and self.peek().text.lower() in FILLERS:
            self.pos += 1
        self.accept("approx")
        named = self.function_label()
        if named is not None:
            return named
        sides, ops = [self.nested(self.union)], []
        while self.peek().kind in ("op", "cmd") and self.peek().text in RELATIONS:
            op = RELATIONS[self.take().text]
            if op in "<>" and self.accept("="):
                op += "="
            if op == "equiv":
                return self.congruence(sides[0])
            ops.append(op)
            sides.append(self.nested(self.union))
        if self.at("pmod", "bmod", "mod"):
            return self.congruence_tail(None if not ops else sides[0], sides[-1])
        if self.at("(") and self.peek(1).text in ("mod", "bmod"):
            return self.congruence_tail(None if not ops else sides[0], sides[-1])
        if "approx" in ops:
            return sides[-1]
        if not ops:
            return _labelled_point(sides[0])
        if set(ops) == {"="} and len(sides) == 2 and _is_label(sides[0]):
            return Named(sides[0], sides[1])
        return Relation(tuple(sides), tuple(ops))

    def function_label(self) -> Node | None:
        """`f(x) =` or `f^{-1}(x) =` names the value that follows; anything else is left alone."""
        if self.peek().kind != "sym":
            return None
        index = 1
        while self.peek(index).text == "'":
            index += 1
        if self.peek(index).text == "^" and self.peek(index + 1).text == "{":
            while self.peek(index).kind != "end" and self.peek(index).text != "}":
                index += 1
            index += 1
        if self.peek(index).text != "(":
            return None
        while self.peek(index).kind != "end" and self.peek(index).text != ")":
            index += 1
            if self.peek(index).kind not in ("sym", "sep", "op") or self.peek(index).text in "+-*/^=(":
                return None
        if self.peek(index + 1).text != "=":
            return None
        label = "".join(token.text for token in self.tokens[self.pos : self.pos + index + 1])
        self.pos += index + 2
        return Named(Sym(label), self.item())

    def congruence(self, left: Node) -> Node:
        return self.congruence_tail(left, self.nested(self.union))

    def congruence_tail(self, left: Node | None, residue: Node) -> Node:
        if self.accept("("):
            self.take()
            modulus = self.nested(self.sum)
            self.expect(")")
        elif self.accept("pmod"):
            modulus = self.argument()
        elif self.at("mod", "bmod"):
            self.take()
            modulus = self.nested(self.sum)
        else:
            raise Unparsed("a congruence without modulus")
        return Congruence(left, residue, modulus)

    # -- sets -----------------------------------------------------------------------------------------------------

    def union(self) -> Node:
        node = self.measured()
        for _ in range(MAX_DEPTH):
            token = self.peek()
            if token.kind == "cmd" and token.text in SET_OPS:
                self.pos += 1
                node = SetOp(SET_OPS[token.text], node, self.measured())
            elif token == Token("sym", "U", token.blank) and isinstance(node, Group) and self.peek(1).text in "([":
                self.pos += 1
                node = SetOp("union", node, self.measured())
            elif token.text == ":" and self.starts_ratio(node):
                items = [node]
                while self.accept(":"):
                    items.append(self.nested(self.sum))
                node = Ratio(tuple(items))
            else:
                return node
        raise TooComplex("a long union")

    def starts_ratio(self, node: Node) -> bool:
        """Whether a colon behind a node divides it; in a set it starts the condition."""
        scalar = not isinstance(node, Group | SetOf | NamedSet)
        return scalar and not self.in_set and self.peek(1).kind in ("num", "sym", "cmd")

    def measured(self) -> Node:
        """A sum with the unit, percent or number word behind it."""
        node = self.sum()
        while self.peek().kind == "word":
            word = self.peek().text.lower()
            if word in units.MULTIPLIERS:
                self.pos += 1
                node = _times(node, Fraction(units.MULTIPLIERS[word]))
            elif word in units.PERCENT_WORDS or (word == "per" and self.peek(1).text == "cent"):
                if isinstance(node, Percent):
                    raise Unparsed("percent twice")
                self.pos += 2 if word == "per" else 1
                node = Percent(node)
            else:
                return self.unit(node)
        self.skip_remark()
        if self.at("mathrm") or (self.peek().kind == "esc" and self.peek().text == "$"):
            self.pos += 1
        return node

    def skip_remark(self) -> None:
        """Passes over words in brackets, `4 (four)`; alternatives and conditions stay and make the text unreadable."""
        end = 1
        while self.peek(end).kind == "word" and self.peek(end).text.lower() not in STOP_WORDS:
            end += 1
        if self.at("(") and end > 1 and self.peek(end).text == ")":
            self.pos += end + 1

    def unit(self, node: Node) -> Node:
        size: tuple[Fraction, units.Dims] = (Fraction(1), ())
        power, words, prefix = 1, 0, 1
        while True:
            token = self.peek()
            word = token.text.lower()
            if token.kind == "word":
                if word in STOP_WORDS or words > 6:
                    raise Unparsed(f"a condition or remark: {word!r}")
                self.pos += 1
                words += 1
                if word == "per":
                    power = -1
                elif word in ("square", "sq", "cubic", "cu"):
                    prefix = 3 if word.startswith("cu") else 2
                elif (known := units.lookup(token.text)) is not None:
                    exponent = self.unit_exponent() * prefix
                    size = units.combine(size, known, power * exponent)
                    power, prefix = 1, 1
                else:
                    self.unit_exponent()
            elif token.text in ("/", "cdot", "*", "times") and self.peek(1).kind == "word":
                self.pos += 1
                power = -1 if token.text == "/" else 1
            else:
                break
        return Quantity(node, size[0], size[1]) if size[1] else node

    def unit_exponent(self) -> int:
        if self.peek().kind == "word" and self.peek().text.lower() in ("squared", "cubed"):
            return 2 if self.take().text.lower() == "squared" else 3
        if not self.accept("^"):
            return 1
        exponent = self.exponent()
        if not (isinstance(exponent, Num) and exponent.value.denominator == 1 and 0 < abs(exponent.value) <= 9):
            raise Unparsed("the power of a unit")
        return int(exponent.value)

    def group(self, opening: str) -> Node:
        """Parentheses, tuples, vectors, intervals (also with outward brackets)."""
        if self.at("or", "and", kinds=("sep",)):
            raise Hedge("alternatives in brackets")
        bars, self.bars = self.bars, 0
        items = [self.nested(self.item)]
        while self.peek().kind == "sep":
            if self.peek().text in ("or", "and"):
                raise Hedge("alternatives in brackets")
            self.pos += 1
            items.append(self.nested(self.item))
        self.bars = bars
        token = self.take()
        closing = _CLOSE.get(token.text) or ("[" if token.text == "[" else "")
        if token.kind not in ("op", "cmd") or not closing:
            raise Unparsed("an open bracket")
        if len(items) == 1 and opening in "([" and closing == ")]"["([".index(opening)]:
            if opening == "[" and self.depth <= 4 and self.peek().kind == "end":
                return Group(opening, closing, tuple(items))
            return items[0]
        return Group(opening, closing, tuple(items))

    def braces(self) -> Node:
        """A set in braces: elements, or an element and its condition."""
        if self.peek().kind == "esc" and self.peek().text == "}":
            self.pos += 1
            return SetOf(())
        bars, self.bars = self.bars, self.bars + 1
        outer, self.in_set = self.in_set, True
        items = [self.nested(self.item)]
        while self.peek().kind == "sep":
            self.pos += 1
            items.append(self.nested(self.item))
        self.bars = bars
        if self.at("|", "mid", ":", "vert"):
            self.pos += 1
            condition = self.nested(self.listing)
            self.in_set = outer
            self.close_set()
            return Builder(items[0], condition)
        self.in_set = outer
        self.close_set()
        return SetOf(tuple(items))

    def close_set(self) -> None:
        if not ((self.peek().kind == "esc" and self.peek().text == "}") or self.at("rbrace")):
            raise Unparsed("an open set")
        self.pos += 1


def _times(node: Node, factor: Fraction) -> Node:
    if isinstance(node, Quantity):
        return Quantity(_times(node.value, factor), node.factor, node.dims)
    return mul(node, Num(factor))


def _labelled_point(node: Node) -> Node:
    """`A(1, 2)` as the point (1, 2) named A."""
    if isinstance(node, Mul) and len(node.factors) == 2:
        label, point = node.factors
        if isinstance(label, Sym) and label.name[0].isupper() and isinstance(point, Group) and len(point.items) > 1:
            return Named(label, point)
    return node


def _is_label(node: Node) -> bool:
    """A name: `x`, `(x, y)`, a segment `AB` or its length `|AB|`."""
    if isinstance(node, Fn) and node.name == "abs":
        node = node.args[0]
        return isinstance(node, Mul) and _is_label(node)
    if isinstance(node, Mul):
        return len(node.factors) <= 4 and all(isinstance(f, Sym) and f.name[0].isupper() for f in node.factors)
    if isinstance(node, Sym):
        return True
    return isinstance(node, Group) and all(isinstance(item, Sym) for item in node.items)
