"""Thoughts of ATHENA: expressions in a canonical form, parsed and written, and the schedule that proposes them.

A thought is a sortable tuple: `("num", 0)`, `("con", "1")`, `("neg", t)`, `("inv", t)`, `("root", t)`, `("halve", t)`,
`("add", t, …)`, `("mul", t, …)`. Sums and products are flat and sorted, so that the order of their terms does not
matter. Nothing cancels.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

Thought = tuple[Any, ...]
Leaf = Callable[[Fraction | str], Thought]

LEAVES = ("num", "con")
TRANSFORMS = ("neg", "inv", "root", "halve")
MERGES = ("add", "mul")
OPERATORS = (*LEAVES, *TRANSFORMS, *MERGES)
SUM, PRODUCT, POWER, ATOM = range(4)  # precedence of an expression


def merged(operator: str, first: Thought, second: Thought) -> Thought:
    parts = (thought[1:] if thought[0] == operator else (thought,) for thought in (first, second))
    return (operator, *sorted(part for terms in parts for part in terms))


class Candidate(NamedTuple):
    """A proposed thought and its operands, indices of kept thoughts; both are the same for a transform and a leaf."""

    operator: str  # of `OPERATORS`
    first: int
    second: int
    thought: Thought  # the result


class Expansion:
    """Schedule that proposes the candidate thoughts of a problem, step by step.

    Step 0 proposes the leaves: the problem's numbers, then the constants. Odd steps transform, even steps merge. A
    candidate has at least one operand that was kept since the last step of its kind, and is never a kept thought.
    """

    def __init__(self, leaves: Sequence[Thought]) -> None:
        self.leaves = list(leaves)
        self.kept: list[Thought] = []  # in order
        self.depth = 0  # of the next step
        self._used = [0, 0]  # number of kept thoughts at the last merge and at the last transform

    @property
    def ended(self) -> bool:
        return self.depth > 0 and self._used[self.depth % 2] == len(self.kept)

    def candidates(self) -> list[Candidate]:
        """Return the candidates of the next step without duplicates, grouped by operator."""
        kept, new = self.kept, range(self._used[self.depth % 2], len(self.kept))
        if self.depth == 0:
            proposed = [Candidate(leaf[0], index, index, leaf) for index, leaf in enumerate(self.leaves)]
        elif self.depth % 2:
            proposed = [Candidate(op, i, i, (op, kept[i])) for op in TRANSFORMS for i in new]
        else:
            pairs = [(i, j) for j in new for i in range(j + 1)]
            proposed = [Candidate(op, i, j, merged(op, kept[i], kept[j])) for op in MERGES for i, j in pairs]
        first: dict[Thought, Candidate] = {}
        for candidate in proposed:
            first.setdefault(candidate.thought, candidate)
        known = set(kept)
        return [candidate for thought, candidate in first.items() if thought not in known]

    def keep(self, accepted: Iterable[Candidate]) -> None:
        self._used[self.depth % 2] = len(self.kept)
        self.kept += [candidate.thought for candidate in accepted]
        self.depth += 1


class LabelledStep(NamedTuple):
    """Candidates of a step, and whether each is part of the equation."""

    candidates: list[Candidate]
    labels: list[bool]


def labelled_steps(leaves: Sequence[Thought], root: Thought, targets: frozenset[Thought]) -> list[LabelledStep]:
    """Return the steps of teacher forcing, which keep all target thoughts; `ValueError` if they miss the root."""
    expansion, steps = Expansion(leaves), list[LabelledStep]()
    while root not in expansion.kept:
        if expansion.ended:
            raise ValueError(f"{root} cannot be reached")
        candidates = expansion.candidates()
        labels = [candidate.thought in targets for candidate in candidates]
        steps.append(LabelledStep(candidates, labels))
        expansion.keep(candidate for candidate, label in zip(candidates, labels, strict=True) if label)
    return steps


# ---------------------------------------------------------------------- equations


class Equation(NamedTuple):
    """An equation as a thought (`root`), and all its subexpressions (`targets`, which include the root)."""

    root: Thought
    targets: frozenset[Thought]


def parse(equation: str, leaf: Leaf) -> Equation:
    """Parse an equation over `+ - * / ^` and brackets; `ValueError` if it is malformed.

    Operations with some constants have a shorter thought: `t * 1` is `t`, `t * 2` is `t + t`, `t / 2` is a half, `1 /
    t` is an inverse, `t ^ 2` is `t * t`. `leaf` returns the thought of a literal number or a name, from left to right.
    """
    try:
        tree = ast.parse(equation.replace("^", "**").strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{equation!r} is not an equation") from error
    return _convert(tree, leaf)


def _convert(node: ast.expr, leaf: Leaf) -> Equation:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _equation(leaf(Fraction(str(number))))
        case ast.Name(id=name):
            return _equation(leaf(name))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _transform("neg", _convert(operand, leaf))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_convert(left, leaf), right, leaf)
        case ast.BinOp(left=left, op=operator, right=right):
            first, second = _convert(left, leaf), _convert(right, leaf)
            match operator:
                case ast.Add():
                    return _merge("add", first, second)
                case ast.Sub():
                    return _merge("add", first, _transform("neg", second))
                case ast.Mult():
                    return _product(first, second)
                case ast.Div():
                    return _quotient(first, second)
    raise ValueError(f"{ast.unparse(node)} is not arithmetic with the four operations and powers")


def _equation(thought: Thought, *parts: Equation) -> Equation:
    return Equation(thought, frozenset({thought}).union(*(part.targets for part in parts)))


def _transform(operator: str, part: Equation) -> Equation:
    return _equation((operator, part.root), part)


def _merge(operator: str, first: Equation, second: Equation) -> Equation:
    return _equation(merged(operator, first.root, second.root), first, second)


def _constant(thought: Thought) -> Fraction | None:
    if thought[0] == "con":
        return Fraction(thought[1])
    return -Fraction(thought[1][1]) if thought[0] == "neg" and thought[1][0] == "con" else None


def _product(first: Equation, second: Equation) -> Equation:
    for factor, other in ((first, second), (second, first)):
        match _constant(factor.root):
            case 1:
                return other
            case -1:
                return _transform("neg", other)
            case 2:
                return _merge("add", other, other)
            case value if value == Fraction(1, 2):
                return _transform("halve", other)
    return _merge("mul", first, second)


def _quotient(dividend: Equation, divisor: Equation) -> Equation:
    match _constant(divisor.root):
        case 1:
            return dividend
        case 2:
            return _transform("halve", dividend)
    inverse = _transform("inv", divisor)
    return inverse if _constant(dividend.root) == 1 else _merge("mul", dividend, inverse)


def _power(base: Equation, node: ast.expr, leaf: Leaf) -> Equation:
    literal = isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    exponent = Fraction(str(node.value)) if literal else _constant(_convert(node, leaf).root)  # type: ignore[attr-defined]
    if exponent == Fraction(1, 2):
        return _transform("root", base)
    if exponent not in (2, 3):
        raise ValueError(f"the exponent {ast.unparse(node)} is not 2, 3 or 1/2")
    square = _merge("mul", base, base)
    return square if exponent == 2 else _merge("mul", square, base)


def expression(thought: Thought, numbers: Sequence[Fraction]) -> str:
    """Write a thought with the values of the problem's numbers and the fewest brackets."""
    return _format(thought, numbers)[0]


def _format(thought: Thought, numbers: Sequence[Fraction]) -> tuple[str, int]:
    """Return an expression and its precedence.

    Negated terms of a sum are written as differences, inverted terms of a product as quotients.
    """

    def part(inner: Thought, precedence: int) -> str:
        text, inner_precedence = _format(inner, numbers)
        return text if inner_precedence >= precedence else f"({text})"

    match thought:
        case ("num", index):
            return _format_number(numbers[index])
        case ("con", value):
            return _format_number(Fraction(value))
        case ("neg", inner):
            return f"-{part(inner, PRODUCT)}", SUM
        case ("inv", inner):
            return f"1 / {part(inner, POWER)}", PRODUCT
        case ("halve", inner):
            return f"{part(inner, PRODUCT)} / 2", PRODUCT
        case ("root", inner):
            return f"{part(inner, ATOM)} ** 0.5", POWER
    operator, *terms = thought
    is_sum = operator == "add"
    opposite, plus, minus, start = ("neg", " + ", " - ", "-") if is_sum else ("inv", " * ", " / ", "1 / ")
    plain = [part(term, PRODUCT) for term in terms if term[0] != opposite]
    inverted = [part(term[1], PRODUCT if is_sum else POWER) for term in terms if term[0] == opposite]
    if not plain:
        plain = [start + inverted.pop(0)]
    return minus.join([plus.join(plain), *inverted]), SUM if is_sum else PRODUCT


def _format_number(value: Fraction) -> tuple[str, int]:
    """Write a number as a finite decimal if possible, else as a fraction in brackets."""
    text = f"{Decimal(abs(value.numerator)) / value.denominator:f}"
    if Fraction(text) != abs(value):
        return f"({value.numerator}/{value.denominator})", ATOM
    return (f"-{text}", SUM) if value < 0 else (text, ATOM)
