"""Formulas: sums, products, powers, functions, fractions, roots, matrices."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from rewardd.math import units
from rewardd.math.errors import Hedge, TooComplex, Unparsed
from rewardd.math.lexer import Token
from rewardd.math.nodes import (
    MINUS_ONE,
    Add,
    Based,
    BigOp,
    Const,
    Degree,
    Ellipsis,
    Fn,
    Listing,
    Matrix,
    NamedSet,
    Node,
    Num,
    Percent,
    PlusMinus,
    Pow,
    Quantity,
    SetOf,
    Sym,
    div,
    mul,
    neg,
)
from rewardd.math.reader import MAX_DEPTH, TokenReader
from rewardd.math.vocabulary import (
    CURRENCY,
    DOTS,
    FUNCTIONS,
    GREEK,
    MATRICES,
    NUMBER_WORDS,
)

_OPEN = {"(": "(", "[": "[", "langle": "<"}


class FormulaParser(TokenReader):
    """The rules below a sum. Brackets may hold whole answers; these rules come from the subclass."""

    def listing(self) -> Node:
        raise NotImplementedError

    def item(self) -> Node:
        raise NotImplementedError

    def group(self, opening: str) -> Node:
        raise NotImplementedError

    def braces(self) -> Node:
        raise NotImplementedError

    def sum(self) -> Node:
        terms: list[Node] = []
        while True:
            sign, plus_minus = 1, 0
            signed = False
            while self.at("+", "-", "pm", "mp"):
                text = self.take().text
                signed = True
                if text == "-":
                    sign = -sign
                elif text in ("pm", "mp"):
                    plus_minus = 1 if text == "pm" else -1
            if terms and not signed:
                break
            term = self.product()
            if sign < 0:
                term = neg(term)
            terms.append(PlusMinus(plus_minus, term) if plus_minus else term)
            if not self.at("+", "-", "pm", "mp"):
                break
        node = terms[0] if len(terms) == 1 else Add(tuple(terms))
        return div(node, self.nested(self.sum)) if self.accept("over") else node

    def product(self) -> Node:
        node = self.factor()
        while True:
            token = self.peek()
            if self.at("*", "times", "cdot", "ast", "bullet"):
                if self.peek(1).kind == "word":
                    return node
                self.pos += 1
                if self.accept("*"):
                    node = Pow(node, self.signed_factor())
                else:
                    node = mul(node, self.signed_factor())
            elif self.at("/", "div"):
                if self.peek(1).kind == "word":
                    return node
                self.pos += 1
                node = div(node, self.signed_factor())
            elif self.starts_factor(token):
                if token.kind == "num" and self.tokens[self.pos - 1].kind == "num":
                    raise Unparsed("two numbers side by side")
                node = mul(node, self.factor())
            else:
                return node

    def signed_factor(self) -> Node:
        if self.accept("-"):
            return neg(self.nested(self.signed_factor))
        self.accept("+")
        return self.factor()

    def starts_factor(self, token: Token) -> bool:
        if token.kind in ("num", "sym"):
            return not (
                token.text == "U" and self.peek(1).text in ("(", "[") and self.tokens[self.pos - 1].text in ")]"
            )
        if token.kind == "op":
            if token.text == "|":
                return self.bars == 0
            modulus = token.text == "(" and (self.peek(1).text in ("mod", "bmod") or self.peek(1).kind == "word")
            return token.text in ("(", "{", "[") and not modulus and not self.closes_outward()
        if token.kind == "esc":
            return False
        return token.kind == "cmd" and (
            token.text in FUNCTIONS or token.text in GREEK or token.text in _PRIMARIES or token.text in ("pi", "infty")
        )

    def closes_outward(self) -> bool:
        """`[` behind an end point closes an interval when nothing can follow as its content."""
        if self.peek().text != "[":
            return False
        following = self.peek(1)
        return following.kind in ("end", "sep") or following.text in ("cup", "cap", ")", "}", "setminus")

    def factor(self) -> Node:
        node = self.nested(self.primary)
        for _ in range(MAX_DEPTH):
            if self.at("^"):
                if self.peek(1).text == "circ" or (self.peek(1).text == "{" and self.peek(2).text == "circ"):
                    node = self.degrees(node)
                    continue
                self.pos += 1
                node = Pow(node, self.exponent())
            elif self.at("deg.", "degree"):
                self.pos += 1
                node = Degree(node)
            elif self.at("!") and self.peek(1).text != "=":
                self.pos += 1
                if self.at("!"):
                    raise Unparsed("a double factorial")
                node = Fn("factorial", (node,))
            elif self.at("%") or (self.peek().kind == "esc" and self.peek().text == "%"):
                self.pos += 1
                node = Percent(node)
            else:
                return node
        raise TooComplex("nesting")

    def degrees(self, node: Node) -> Node:
        self.pos += 1
        if self.accept("{"):
            self.take()
            self.expect("}")
        else:
            self.take()
        scale = self.peek()
        if scale.text in ("C", "F") and scale.kind in ("sym", "word") and self.peek(1).kind == "end":
            self.pos += 1
            return Quantity(node, Fraction(1), (("celsius" if scale.text == "C" else "fahrenheit", 1),))
        return Degree(node)

    def exponent(self) -> Node:
        if self.accept("{"):
            node = self.nested(self.sum)
            self.expect("}")
            return node
        sign = 1
        while self.at("-", "+"):
            sign = -sign if self.take().text == "-" else sign
        node = self.nested(self.primary)
        if self.accept("^"):
            node = Pow(node, self.nested(self.exponent))
        return node if sign > 0 else neg(node)

    def argument(self) -> Node:
        """A braced argument, or one token; of a number only its first digit, as in `\\frac34`."""
        if self.accept("{"):
            node = self.nested(self.sum)
            self.expect("}")
            return node
        token = self.peek()
        if token.kind == "num" and token.text:
            rest = token.text[1:]
            if rest:
                if not token.text.isdigit():
                    raise Unparsed("a decimal as unbraced argument")
                self.tokens[self.pos] = Token("num", rest, False, Fraction(rest))
            else:
                self.pos += 1
            return Num(Fraction(token.text[0]))
        return self.nested(self.primary)

    def primary(self) -> Node:
        token = self.take()
        if token.kind == "num":
            return self.number(token)
        if token.kind == "sym":
            return self.symbol(token.text)
        if token.kind == "op":
            return self.bracketed(token)
        if token.kind == "esc":
            if token.text == "{":
                return self.braces()
            if token.text == "$":
                return self.currency("$")
            if token.text == "|":
                raise Unparsed("a norm")
        if token.kind == "sep" and token.text in ("or", "and"):
            raise Hedge(token.text)
        if token.kind == "cmd":
            return self.command(token.text)
        raise Unparsed(f"unexpected {token.text or 'end'!r}")

    def currency(self, sign: str) -> Node:
        known = units.lookup(CURRENCY[sign])
        assert known is not None
        return Quantity(self.nested(self.product), known[0], known[1])

    def number(self, token: Token) -> Node:
        assert token.value is not None
        node: Node = Num(token.value)
        if token.text.isdigit():
            mixed = self.mixed_tail()
            if mixed is not None:
                return Num(token.value + mixed)
            if self.at("_"):
                return self.based(token.text)
        return node

    def mixed_tail(self) -> Fraction | None:
        """The proper fraction of a mixed number: `2\\frac{1}{2}`, `2 1/2`; None (nothing consumed) otherwise."""
        start, saved = self.pos, self.tokens[:]
        if self.at("frac"):
            self.pos += 1
            top, bottom = self.argument(), self.argument()
            if (
                isinstance(top, Num)
                and isinstance(bottom, Num)
                and 0 < top.value < bottom.value
                and top.value.denominator == bottom.value.denominator == 1
            ):
                return top.value / bottom.value
        elif (
            self.peek().kind == "num" and self.peek().blank and self.peek(1).text == "/" and self.peek(2).kind == "num"
        ):
            numerator, denominator = self.peek(), self.peek(2)
            if numerator.text.isdigit() and denominator.text.isdigit():
                top_value, bottom_value = int(numerator.text), int(denominator.text)
                if 0 < top_value < bottom_value:
                    self.pos += 3
                    return Fraction(top_value, bottom_value)
        self.pos, self.tokens = start, saved
        return None

    def based(self, digits: str) -> Node:
        self.pos += 1
        if self.peek().text == "{" and self.peek(1).text.lower() in NUMBER_WORDS:
            base = int(NUMBER_WORDS[self.peek(1).text.lower()])
            self.pos += 2
            self.expect("}")
        else:
            node = self.exponent()
            if not isinstance(node, Num) or node.value.denominator != 1:
                raise Unparsed("a numeral base")
            base = int(node.value)
        if not 2 <= base <= 36 or any(int(d) >= base for d in digits):
            raise Unparsed("a numeral that does not fit its base")
        return Based(int(digits, base), base)

    def symbol(self, letter: str) -> Node:
        name = letter
        if self.accept("_"):
            name += "_" + self.subscript()
        while self.accept("'"):
            name += "'"
        if name in ("e", "i"):
            return Const(name)
        return Sym(name)

    def subscript(self) -> str:
        if not self.accept("{"):
            return self.take().text
        parts: list[str] = []
        while not self.at("}"):
            if self.peek().kind == "end":
                raise Unparsed("an open subscript")
            parts.append(self.take().text)
        self.pos += 1
        return "".join(parts)

    def bracketed(self, token: Token) -> Node:
        if token.text == "{":
            node = self.nested(self.listing)
            self.expect("}")
            return SetOf(node.items) if isinstance(node, Listing) else node
        if token.text in ("(", "[", "]"):
            return self.group(token.text)
        if token.text == "|":
            self.bars += 1
            node = self.nested(self.sum)
            self.bars -= 1
            self.expect("|")
            return Fn("abs", (node,))
        if token.text in "+-":
            node = self.nested(self.primary)
            return neg(node) if token.text == "-" else node
        raise Unparsed(f"unexpected {token.text!r}")

    def command(self, name: str) -> Node:
        if name in FUNCTIONS or name in ("arccosh", "arcsinh"):
            return self.function(name)
        handler = _PRIMARIES.get(name)
        if handler is not None:
            return handler(self)
        if name in GREEK:
            return self.symbol({"varepsilon": "epsilon", "varphi": "phi", "vartheta": "theta"}.get(name, name))
        if name in DOTS:
            return Ellipsis()
        if name in CURRENCY:
            return self.currency(name)
        if name in _OPEN:
            return self.group(_OPEN[name])
        raise Unparsed(f"command {name!r}")

    def function(self, name: str) -> Node:
        if name == "sqrt":
            return self.root()
        if name == "binom":
            return self.binomial()
        power: Node | None = None
        base: Node | None = None
        while self.at("^", "_"):
            if self.take().text == "^":
                power = self.exponent()
            else:
                base = self.exponent()
        args = self.function_arguments()
        if len(args) != 1 and name not in ("gcd", "lcm", "max", "min"):
            raise Unparsed(f"{name} of {len(args)} arguments")
        if name == "lg":
            name, base = "log", Num(Fraction(10))
        if name in ("log", "ln") and base is not None:
            name, args = "log", (args[0], base)
        if name == "exp":
            return Pow(Const("e"), args[0])
        if power == MINUS_ONE and name in ("sin", "cos", "tan", "cot"):
            return Fn("arc" + name, args)
        node = Fn(name, args)
        return node if power is None else Pow(node, power)

    def function_arguments(self) -> tuple[Node, ...]:
        if self.at("(") or self.at("["):
            self.pos += 1
            return self.arguments()
        if self.accept("{"):
            node = self.nested(self.sum)
            self.expect("}")
            return (node,)
        sign = -1 if self.accept("-") else 1
        node = self.factor()
        while self.starts_factor(self.peek()) and not (
            self.peek().kind == "cmd" and self.peek().text in FUNCTIONS - {"sqrt"}
        ):
            if self.at("(", "["):
                break
            node = mul(node, self.factor())
        if (
            self.at("/")
            and self.peek(1).kind == "num"
            and self.peek(2).kind in ("end", "op")
            and self.peek(2).text != "^"
        ):
            self.pos += 1
            node = div(node, self.factor())
        return (neg(node) if sign < 0 else node,)

    def arguments(self) -> tuple[Node, ...]:
        """After an opening bracket: expressions up to the closing one."""
        bars, self.bars = self.bars, 0
        args = [self.nested(self.sum)]
        while self.peek().kind == "sep" and self.peek().text == ",":
            self.pos += 1
            args.append(self.nested(self.sum))
        self.bars = bars
        if self.take().text not in (")", "]"):
            raise Unparsed("an open bracket")
        return tuple(args)

    def root(self) -> Node:
        degree: Node | None = None
        if self.accept("["):
            degree = self.nested(self.sum)
            self.expect("]")
        if self.accept("("):
            arg = self.arguments()[0]
        else:
            arg = self.argument()
        return Fn("sqrt", (arg,)) if degree is None else Fn("root", (arg, degree))

    def fraction(self) -> Node:
        top = self.argument()
        return div(top, self.argument())

    def binomial(self) -> Node:
        if self.accept("("):
            pair = self.arguments()
            if len(pair) != 2:
                raise Unparsed("a binomial coefficient")
            return Fn("binom", pair)
        top = self.argument()
        return Fn("binom", (top, self.argument()))

    def big(self, kind: str) -> Node:
        var, low, high = "", None, None
        while self.at("_", "^"):
            if self.take().text == "_":
                self.expect("{")
                var = self.take().text
                self.expect("=")
                low = self.nested(self.sum)
                self.expect("}")
            else:
                high = self.exponent()
        if not var or low is None or high is None:
            raise Unparsed(f"a {kind} without bounds")
        return BigOp(kind, var, low, high, self.nested(self.product))

    def delimited(self, name: str, closing: str) -> Node:
        node = self.nested(self.sum)
        self.expect(closing)
        return Fn(name, (node,))

    def environment(self) -> Node:
        name = self.braced_word()
        if name not in MATRICES and name != "cases":
            raise Unparsed(f"environment {name!r}")
        if name == "array" and self.accept("{"):
            while not self.accept("}"):
                if self.take().kind == "end":
                    raise Unparsed("an open environment")
        rows: list[tuple[Node, ...]] = []
        row: list[Node] = []
        while True:
            if self.at("end"):
                self.pos += 1
                self.braced_word()
                break
            row.append(self.nested(self.item if name == "cases" else self.sum))
            if name == "cases" and self.peek().kind == "sep":
                self.pos += 1
            if self.accept("&"):
                continue
            rows.append(tuple(row))
            row = []
            if self.peek().kind == "esc" and self.peek().text == "\\":
                self.pos += 1
            elif not self.at("end"):
                raise Unparsed("a matrix cell")
        if not rows or len({len(r) for r in rows}) != 1:
            raise Unparsed("a ragged matrix")
        if name == "cases" and len(rows[0]) == 1:
            return Listing(tuple(cell for (cell,) in rows), "and")
        return Matrix(tuple(rows))

    def braced_word(self) -> str:
        self.expect("{")
        letters: list[str] = []
        while not self.at("}"):
            token = self.take()
            if token.kind not in ("sym", "word"):
                raise Unparsed("an environment name")
            letters.append(token.text)
        self.pos += 1
        return "".join(letters)

    def figure(self, kind: str) -> Node:
        """`\\angle ABC` as one name."""
        letters: list[str] = []
        while self.peek().kind == "sym":
            letters.append(self.take().text)
        if not letters:
            raise Unparsed(kind)
        return Sym(f"{kind} {''.join(letters)}")

    def named_set(self) -> Node:
        letter = self.braced_word() if self.at("{") else self.take().text
        if letter not in ("R", "Z", "N", "Q", "C"):
            return Sym(f"mathbb {letter}")
        suffix = ""
        if self.at("^", "_") and (self.peek(1).text in "+-" or self.peek(2).text in "+-"):
            self.pos += 1
            suffix = self.subscript()
        return NamedSet(letter + suffix)


_PRIMARIES: dict[str, Callable[[FormulaParser], Node]] = {
    "frac": FormulaParser.fraction,
    "dbinom": FormulaParser.binomial,
    "tbinom": FormulaParser.binomial,
    "sum": lambda p: p.big("sum"),
    "prod": lambda p: p.big("prod"),
    "begin": FormulaParser.environment,
    "mathbb": FormulaParser.named_set,
    "lbrace": lambda p: p.braces(),
    "lvert": lambda p: p.delimited("abs", "rvert"),
    "lfloor": lambda p: p.delimited("floor", "rfloor"),
    "lceil": lambda p: p.delimited("ceil", "rceil"),
    "pi": lambda p: Const("pi"),
    "infty": lambda p: Const("inf"),
    "angle": lambda p: p.figure("angle"),
    "triangle": lambda p: p.figure("triangle"),
    "emptyset": lambda p: SetOf(()),
    "varnothing": lambda p: SetOf(()),
}
