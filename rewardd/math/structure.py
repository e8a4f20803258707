"""Comparison of two readings by structure: units, lists, sets, intervals, matrices, equations; values at the leaves.

Every rule answers True, False or None (undecided by the leaf comparison it was given).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from rewardd.math import exact, realset
from rewardd.math.nodes import (
    Based,
    Builder,
    Choice,
    Congruence,
    Const,
    Degree,
    Ellipsis,
    Group,
    Listing,
    Matrix,
    Named,
    Node,
    Num,
    Opaque,
    Quantity,
    Ratio,
    Relation,
    SetOf,
    SetOp,
    Sym,
    Text,
    mul,
    neg,
    symbols,
)
from rewardd.math.shapes import (
    ANGLE,
    COLLECTIONS,
    as_collection,
    as_interval,
    both,
    chain_value,
    column,
    difference,
    either,
    equation,
    expand,
    has_dots,
    has_pi,
    in_name_order,
    is_continuum,
    is_implicit,
    members,
    named_items,
    quantity,
    ratio_items,
    root_name,
    unwrap,
)

MAX_PAIRS = 10_000
_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


class Comparison:
    """Compares nodes; `leaf` decides two scalar formulas, `reason` names the rule that said no."""

    def __init__(self, leaf: Callable[[Node, Node], bool | None]) -> None:
        self.leaf = leaf
        self.reason = "different"

    def no(self, reason: str) -> bool:
        self.reason = reason
        return False

    def equal(self, gold: Node, answer: Node) -> bool | None:
        """Whether the answer states what the reference states."""
        gold, answer = unwrap(gold), unwrap(answer)
        if gold == answer and not isinstance(gold, Opaque):
            return True
        if isinstance(gold, Choice) or isinstance(answer, Choice):
            return self.choice(gold, answer)
        if isinstance(gold, Named) or isinstance(answer, Named):
            return self.named(gold, answer)
        if isinstance(gold, Text) or isinstance(answer, Text):
            return self.no("different_text")
        if isinstance(gold, Congruence) or isinstance(answer, Congruence):
            return self.congruence(gold, answer)
        if isinstance(gold, Matrix) and isinstance(answer, Matrix):
            return self.matrix(gold, answer)
        if is_continuum(gold) or is_continuum(answer):
            return self.continuum(gold, answer)
        if isinstance(answer, Ellipsis):
            return self.no("no_answer")
        gold, answer = as_collection(gold), as_collection(answer)
        if isinstance(gold, COLLECTIONS) or isinstance(answer, COLLECTIONS):
            return self.collections(gold, answer)
        if isinstance(gold, Relation) or isinstance(answer, Relation):
            return self.relations(gold, answer)
        return self.scalar(gold, answer)

    # -- labels ---------------------------------------------------------------------------------------------------

    def choice(self, gold: Node, answer: Node) -> bool | None:
        if isinstance(gold, Choice) and isinstance(answer, Choice):
            return True if gold.letter == answer.letter else self.no("other_choice")
        option, other, is_gold = (gold, answer, True) if isinstance(gold, Choice) else (answer, gold, False)
        assert isinstance(option, Choice)
        if isinstance(other, Sym) and len(other.name) == 1 and other.name.isupper():
            return True if option.letter == other.name else self.no("other_choice")
        if option.rest is None:
            return self.no("different")
        return self.equal(option.rest, other) if is_gold else self.equal(other, option.rest)

    def named(self, gold: Node, answer: Node) -> bool | None:
        if isinstance(gold, Named) and isinstance(answer, Named):
            same_label = gold.label == answer.label or not (
                isinstance(gold.label, Sym) and isinstance(answer.label, Sym)
            )
            functions = all("(" in n.label.name for n in (gold, answer) if isinstance(n.label, Sym))
            if (
                same_label
                or functions
                or (symbols(gold.value) and symbols(answer.value) and not is_implicit(gold, answer))
            ):
                return self.equal(gold.value, answer.value)
            return self.relations(equation(gold), equation(answer))
        named, other = (gold, answer) if isinstance(gold, Named) else (answer, gold)
        assert isinstance(named, Named)
        if isinstance(other, Relation) and set(other.ops) == {"="}:
            return self.relations(equation(gold), equation(answer))
        return self.equal(named.value, answer) if named is gold else self.equal(gold, named.value)

    # -- relations ------------------------------------------------------------------------------------------------

    def congruence(self, gold: Node, answer: Node) -> bool | None:
        if not isinstance(answer, Congruence):
            return self.no("different")
        if not isinstance(gold, Congruence):
            return self.leaf(gold, answer.residue)
        if gold.left is not None and answer.left is not None and gold.left != answer.left:
            return self.no("different")
        m1, m2 = exact.rational(gold.modulus), exact.rational(answer.modulus)
        r1, r2 = exact.rational(gold.residue), exact.rational(answer.residue)
        if m1 is None or m2 is None or r1 is None or r2 is None:
            return both([self.leaf(gold.modulus, answer.modulus), self.leaf(gold.residue, answer.residue)])
        return m1 == m2 != 0 and (r1 - r2) % m1 == 0

    def relations(self, gold: Node, answer: Node) -> bool | None:
        """Equations up to a constant factor; inequalities up to a positive one; chains of equal numbers are a value."""
        gold, answer = chain_value(gold, self.leaf), chain_value(answer, self.leaf)
        if not (isinstance(gold, Relation) and isinstance(answer, Relation)):
            if not isinstance(gold, Relation) and not isinstance(answer, Relation):
                return self.equal(gold, answer)
            return self.no("different")
        if len(gold.ops) != 1 or len(answer.ops) != 1:
            forward = gold.ops == answer.ops and both(map(self.leaf, gold.sides, answer.sides))
            flipped = tuple(_FLIP.get(op, op) for op in reversed(answer.ops))
            backward = gold.ops == flipped and both(map(self.leaf, gold.sides, reversed(answer.sides)))
            return either([forward, backward])
        if "in" in gold.ops or "in" in answer.ops:
            same = gold.ops == answer.ops
            return both(map(self.equal, gold.sides, answer.sides)) if same else self.no("different")
        ratio = exact.proportional(difference(gold), difference(answer))
        if gold.ops == answer.ops == ("=",) or gold.ops == answer.ops == ("!=",):
            if ratio is None:
                left, right = difference(gold), difference(answer)
                return either([self.leaf(left, right), self.leaf(left, neg(right))])
            return True if ratio else self.no("different")
        if ratio is None:
            direct = gold.ops == answer.ops and both(map(self.leaf, gold.sides, answer.sides))
            flipped_op = _FLIP.get(answer.ops[0]) == gold.ops[0]
            return either([direct, flipped_op and both(map(self.leaf, gold.sides, reversed(answer.sides)))])
        if not isinstance(ratio, Fraction):
            return self.no("different") if not ratio else None
        expected = answer.ops[0] if ratio > 0 else _FLIP.get(answer.ops[0])
        return True if gold.ops[0] == expected else self.no("different")

    # -- sets and lists -------------------------------------------------------------------------------------------

    def continuum(self, gold: Node, answer: Node) -> bool | None:
        try:
            left = realset.of_node(gold, self.leaf)
        except realset.Unclear:
            return self.same_shape(gold, answer)
        try:
            right = realset.of_node(answer, self.leaf)
            return True if realset.same(left, right, self.leaf) else self.no("different")
        except realset.Unclear:
            if isinstance(answer, Num | Sym | Const):
                return self.no("different")
            return self.same_shape(gold, answer)

    def same_shape(self, gold: Node, answer: Node) -> bool | None:
        """Sets that have no place on the number line: equal part by part, an interval also as a chain."""
        gold, answer = as_interval(gold), as_interval(answer)
        if isinstance(gold, Relation) and isinstance(answer, Relation):
            return self.relations(gold, answer)
        if type(gold) is not type(answer):
            return self.no("different")
        if isinstance(gold, Group) and isinstance(answer, Group):
            return self.groups(gold, answer)
        if isinstance(gold, SetOp) and isinstance(answer, SetOp):
            if gold.op != answer.op:
                return self.no("different")
            direct = both([self.equal(gold.left, answer.left), self.equal(gold.right, answer.right)])
            if gold.op == "minus":
                return direct
            return either([direct, both([self.equal(gold.left, answer.right), self.equal(gold.right, answer.left)])])
        if isinstance(gold, Builder) and isinstance(answer, Builder):
            return both([self.equal(gold.element, answer.element), self.equal(gold.condition, answer.condition)])
        if isinstance(gold, Listing) and isinstance(answer, Listing):
            return self.unordered(gold.items, answer.items)
        return self.no("different")

    def collections(self, gold: Node, answer: Node) -> bool | None:
        assignments, given = named_items(gold), named_items(answer)
        if assignments and given:
            if assignments.keys() != given.keys():
                return self.no("different")
            return both([self.equal(assignments[name], given[name]) for name in assignments])
        named, other = (assignments, answer) if assignments else (given, gold)
        if named and isinstance(other, Listing | SetOf) and len({root_name(label) for label in named}) == 1:
            return self.unordered(members(gold), members(answer))
        if assignments or given:
            gold = in_name_order(gold, assignments) if assignments else gold
            answer = in_name_order(answer, given) if given else answer
        gold, answer = column(gold), column(answer)
        if isinstance(gold, Group) and isinstance(answer, Group):
            return self.groups(gold, answer)
        if isinstance(gold, Ratio) or isinstance(answer, Ratio):
            return self.ratio(gold, answer)
        if isinstance(gold, Group) or isinstance(answer, Group):
            group, other = (gold, answer) if isinstance(gold, Group) else (answer, gold)
            assert isinstance(group, Group)
            if isinstance(other, Listing) and other.joiner != "or" and group.opening != "[" == group.closing:
                return self.no("different")
            if isinstance(other, Listing) and other.joiner != "or" and len(other.items) > 1:
                return self.ordered(members(gold), members(answer))
            if len(group.items) == 1:
                return self.equal(group.items[0], other) if group is gold else self.equal(other, group.items[0])
            return self.no("different")
        if isinstance(gold, Matrix) or isinstance(answer, Matrix):
            return self.no("different")
        left, right = expand(members(gold)), expand(members(answer))
        if has_dots(left) or has_dots(right):
            return self.ordered(left, right)
        verdict = self.unordered(left, right)
        if verdict is False and not isinstance(gold, COLLECTIONS):
            self.reason = "hedge"
        return verdict

    def groups(self, gold: Group, answer: Group) -> bool | None:
        if len(gold.items) != len(answer.items):
            return self.no("different_length")
        brackets, others = (gold.opening, gold.closing), (answer.opening, answer.closing)
        interval_like = len(gold.items) == 2 and ("<", ">") not in (brackets, others)
        if brackets != others and interval_like and not {brackets, others} <= {("(", ")"), ("]", "[")}:
            return self.no("different_brackets")
        return self.ordered(gold.items, answer.items)

    def ordered(self, gold: tuple[Node, ...], answer: tuple[Node, ...]) -> bool | None:
        if len(gold) != len(answer):
            return self.no("different_length")
        return both([self.equal(g, a) for g, a in zip(gold, answer, strict=True)])

    def unordered(self, gold: tuple[Node, ...], answer: tuple[Node, ...]) -> bool | None:
        """Equality as sets: every element has a partner on the other side."""
        values = [[exact.rational(item) if isinstance(item, Num) else None for item in side] for side in (gold, answer)]
        if all(v is not None for side in values for v in side):
            return True if set(values[0]) == set(values[1]) else self.no("different_elements")
        if len(gold) * len(answer) > MAX_PAIRS:
            return None
        table = [[self.equal(g, a) for a in answer] for g in gold]
        rows = [either(row) for row in table]
        columns = [either([row[j] for row in table]) for j in range(len(answer))]
        verdict = both(rows + columns)
        return self.no("different_elements") if verdict is False else verdict

    def ratio(self, gold: Node, answer: Node) -> bool | None:
        left, right = ratio_items(gold), ratio_items(answer)
        if left is None or right is None or len(left) != len(right):
            return self.no("different")
        return both([self.leaf(mul(left[0], b), mul(right[0], a)) for a, b in zip(left[1:], right[1:], strict=True)])

    def matrix(self, gold: Matrix, answer: Matrix) -> bool | None:
        if len(gold.rows) != len(answer.rows) or len(gold.rows[0]) != len(answer.rows[0]):
            return self.no("different_shape")
        pairs = zip(gold.rows, answer.rows, strict=True)
        return both([self.equal(g, a) for left, right in pairs for g, a in zip(left, right, strict=True)])

    # -- scalars --------------------------------------------------------------------------------------------------

    def scalar(self, gold: Node, answer: Node) -> bool | None:
        gold, answer = quantity(gold), quantity(answer)
        if isinstance(gold, Based) or isinstance(answer, Based):
            return self.based(gold, answer)
        if not (isinstance(gold, Quantity) and isinstance(answer, Quantity)):
            for one, other in ((gold, answer), (answer, gold)):
                if (
                    isinstance(one, Quantity)
                    and one.dims == ANGLE
                    and not isinstance(other, Quantity)
                    and has_pi(other)
                ):
                    return self.leaf(Degree(one.value), other)
            left = gold.value if isinstance(gold, Quantity) else gold
            right = answer.value if isinstance(answer, Quantity) else answer
            return self.leaf(left, right)
        if gold.dims != answer.dims:
            return self.no("unit_conflict")
        if gold.factor == answer.factor:
            return self.leaf(gold.value, answer.value)
        verdict = self.leaf(mul(gold.value, Num(gold.factor)), mul(answer.value, Num(answer.factor)))
        return self.no("unit_conflict") if verdict is False else verdict

    def based(self, gold: Node, answer: Node) -> bool | None:
        if isinstance(gold, Based) and isinstance(answer, Based):
            return True if gold.value == answer.value else self.no("different")
        numeral, other = (gold, answer) if isinstance(gold, Based) else (answer, gold)
        assert isinstance(numeral, Based)
        return self.leaf(Num(Fraction(numeral.value)), other)
