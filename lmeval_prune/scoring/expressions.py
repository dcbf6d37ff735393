"""Arithmetic expressions that models write: evaluated safely, and classed by complexity.

Nothing is executed: the text is parsed to a tree of numbers, names, + − × ÷ and powers, and computed with
exact fractions whose size is bounded. `9**9**9`, a million brackets and a division by zero have no value.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from lmeval_prune.scoring.normalisation import clean, encloses, plain, stage

MAX_LENGTH = 400  # characters
MAX_BITS = 2048  # of a numerator or denominator
MAX_EXPONENT = 64

_SIGNS = str.maketrans("×·⋅∗•÷∶—–[]", "*****//--()")
_PYTHON = str.maketrans({"^": "**", "{": "(", "}": ")"})
_ARITHMETIC, _FRACTIONS = stage("arithmetic"), stage("fractions", rounds=MAX_LENGTH)
_QUANTITIES, _PRODUCTS = stage("quantities"), stage("products")
_MIXED = re.compile(r"(?<![\w.)@])(\d+)(?:\s+|\s*(\())(\d+)\s*/\s*(\d+)(?(2)\))(?![\w.])")  # 3 1/2, 3(1/2)


def _literal(mixed: re.Match[str]) -> str:
    """Return `a@b`, a fraction that nobody has to compute, for `3 1/2`; `2(6/3)` is a product."""
    integer, _, top, bottom = mixed.groups()
    return mixed[0] if int(top) >= int(bottom) else f"({int(integer) * int(bottom) + int(top)}@{int(bottom)})"


def evaluate(text: str, names: Mapping[str, Fraction] | None = None) -> Fraction | None:
    r"""Return the value of an arithmetic expression, or None if it has none.

    Args:
        text: e.g. `(3+4)*2`, `x = n0 / (1 - n1)`, `3*(5+25%)`, `\frac{12+8}{4}`, `2(3+4)`, `5 x 3 apples`; of an
            equation, the first side that computes something. `3(1/2)` is the mixed number.
        names: values of names such as `n0`.
    """
    tree = _tree(text)
    try:
        return None if tree is None else _value(tree, names or {})
    except (ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return None


def has_operator(text: str) -> bool:
    """Return whether an expression computes something: `3*4` and `7+2=9` do; `12`, `x=-5`, `25%` and `3 1/2` do not."""
    tree = _tree(text)
    return tree is not None and _computes(tree)


def is_division(text: str) -> bool:
    """Return whether an expression is one division and computes nothing else."""
    parts = _division(text)
    return bool(parts) and not any(map(_computes, parts))


def reduced_fraction(text: str) -> Fraction | None:
    """Return the value of a fraction of two whole numbers in lowest terms, as numbers are written: `1/4`, not `6/2`."""
    parts = [_unsigned(part) for part in _division(text)]
    numbers = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, int)]
    if len(numbers) < 2 or numbers[1] < 2 or math.gcd(*numbers) > 1:
        return None
    return evaluate(text)


def _division(text: str) -> list[ast.expr]:
    top = _unsigned(_tree(text))
    return [top.left, top.right] if isinstance(top, ast.BinOp) and isinstance(top.op, ast.Div) else []


def _unsigned(tree: ast.expr | None) -> ast.expr | None:
    return tree.operand if isinstance(tree, ast.UnaryOp) else tree


def _computes(tree: ast.expr) -> bool:
    return any(isinstance(node, ast.BinOp) and not isinstance(node.op, ast.MatMult) for node in ast.walk(tree))


def _tree(text: str) -> ast.expr | None:
    """Parse the side of an equation that computes something, the first such, else its only one that is no bare name."""
    if len(text) > MAX_LENGTH or "@" in text:  # before any pattern is tried on it
        return None
    text = _ARITHMETIC(plain(clean(text).strip(" \n*`_")).translate(_SIGNS))
    text = _FRACTIONS(text).translate(_PYTHON).strip().rstrip(" .。")
    sides = [tree for side in text.split("=") if (tree := _parsed(side))]
    values = [tree for tree in sides if not isinstance(tree, ast.Name)] or sides[-1:]
    return next(filter(_computes, sides), values[0] if len(values) == 1 else None)


def _parsed(side: str) -> ast.expr | None:
    side = _PRODUCTS(_MIXED.sub(_literal, _QUANTITIES(side))).strip()
    try:
        return ast.parse(side, mode="eval").body if len(side) <= 2 * MAX_LENGTH else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.MatMult: operator.truediv,
}


def _value(node: ast.expr, names: Mapping[str, Fraction]) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = Fraction(str(number))
        case ast.Name(id=name) if name in names:
            value = names[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _value(operand, names) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            exponent = _value(right, names)
            if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
                raise ValueError("not arithmetic")
            value = _value(left, names) ** int(exponent)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            value = _OPERATIONS[type(operation)](_value(left, names), _value(right, names))
        case _:
            raise ValueError("not arithmetic")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise OverflowError("too large")
    return value


# --------------------------------------------------------------------------- complexity

_SIGN = re.compile(r"(?<![\w).])[-+]")  # a sign, no operator: -3, 2*-3
_NAME = re.compile(r"\s*[A-Za-z_]\w*\s*")  # of a value: x


def complexity(expression: str) -> str:
    """Return the complexity of a gold expression, by the three levels of the dynamic pruning paper (§4.1).

    Low: one or two operators without nesting. Medium: three or four operators, or one level of nesting.
    High: five or more operators, or several levels. What the paper leaves open is read so: the higher
    of the two criteria decides; no operator is low; a sign is not an operator and a power is one; a
    bracket counts as nesting only if it holds an operator and is not around the whole expression; of
    an equation, the left side counts (`7+2=9`), or the right if the left is a bare name (`x=7+2`).
    """
    sides = expression.split("=")
    text = sides[1] if len(sides) > 1 and _NAME.fullmatch(sides[0]) else sides[0]
    text = re.sub(r"\s", "", text).replace("[", "(").replace("]", ")")
    operators, levels = 0, [(0, False)]  # of each open bracket: the levels in it, and whether it holds an operator
    for sign in re.findall(r"\*\*|[-+*/^×÷()]", _SIGN.sub("", text)):
        if sign == "(":
            levels.append((0, False))
        elif sign != ")":
            operators, levels[-1] = operators + 1, (levels[-1][0], True)
        elif len(levels) > 1:
            inner, holds = levels.pop()
            levels[-1] = max(levels[-1][0], inner + holds), levels[-1][1]
    nesting = levels[0][0] - (levels[0][0] > 0 and encloses(text, "("))
    if operators >= 5 or nesting >= 2:
        return "high"
    return "medium" if operators >= 3 or nesting == 1 else "low"
