"""Arithmetic expressions that models write: evaluated safely, and classed by complexity.

Nothing is executed: the text is parsed to a tree of numbers, names, + − × ÷ and powers, and computed with
exact fractions whose size is bounded. `9**9**9`, a million brackets and a division by zero have no value.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from fractions import Fraction

from lmeval_prune.scoring.numbers import normalise

MAX_LENGTH = 400  # characters
MAX_BITS = 2048  # of a numerator or denominator
MAX_EXPONENT = 64

_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "∶": "/", "[": "(", "]": ")", "{": "(", "}": ")", "^": "`"})
_OPERATOR = re.compile(r"\*\*|[-+*/^×÷]")


def evaluate(text: str, names: Mapping[str, Fraction] | None = None) -> Fraction | None:
    """Value of an arithmetic expression, or None if it has none.

    Args:
        text: e.g. `(3+4)*2`, `x = n0 / (1 - n1)`, `3*(5+25%)`; of an equation with one `=`, a side that is
            a bare name or the value after the expression is passed over.
        names: values of names such as `n0`.
    """
    if len(text) > MAX_LENGTH:  # before any pattern is tried on it
        return None
    text = normalise(text).translate(_SIGNS).replace("`", "**").replace("\\times", "*").replace("\\div", "/")
    text = text.replace("\\cdot", "*").strip().strip("$").strip()
    sides = [side.strip() for side in text.split("=")]
    if len(sides) == 2:
        text = sides[1] if re.fullmatch(r"[A-Za-z_]\w*", sides[0]) else sides[0]
    elif len(sides) > 2:
        return None
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(\d+(?:\.\d+)?)\s*%", r"(\1/100)", text)
    if not text or len(text) > MAX_LENGTH:
        return None
    try:
        return _value(ast.parse(text, mode="eval").body, names or {})
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError, OverflowError):
        return None


def _value(node: ast.expr, names: Mapping[str, Fraction]) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = Fraction(str(number))
        case ast.Name(id=name) if name in names:
            value = names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand, names)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _value(operand, names)
        case ast.BinOp(left=left, op=operator, right=right):
            value = _combine(operator, _value(left, names), _value(right, names))
        case _:
            raise ValueError(f"not arithmetic: {type(node).__name__}")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise OverflowError("too large")
    return value


def _combine(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.Pow() if right.denominator == 1 and abs(right) <= MAX_EXPONENT:
            return left ** int(right)
    raise ValueError("not arithmetic")


def complexity(expression: str) -> str:
    """Complexity of a gold expression, by the three levels of the dynamic pruning paper (§4.1).

    Low: one or two operators without nesting. Medium: three or four operators, or one level of nesting.
    High: five or more operators, or several levels. What the paper leaves open is read so: the higher
    of the two criteria decides; no operator is low; a sign is not an operator and a power is one; a
    bracket counts as nesting only if it holds an operator and is not around the whole expression; of
    an equation, the left side counts (`7+2=9`), or the right if the left is a bare name (`x=7+2`).
    """
    sides = expression.split("=")
    text = sides[1] if len(sides) > 1 and re.fullmatch(r"\s*[A-Za-z_]\w*\s*", sides[0]) else sides[0]
    text = re.sub(r"\s", "", text).replace("[", "(").replace("]", ")")
    while text.startswith("(") and _closing(text) == len(text) - 1:
        text = text[1:-1]
    text = re.sub(r"(?<![\w).])[-+]|(?<=[-+*/^(])[-+]", "", text)
    operators = len(_OPERATOR.findall(text))
    deepest = 0
    open_brackets: list[list[int]] = []  # of each: holds an operator itself, levels of nesting inside
    for match in re.finditer(r"[()]|\*\*|[-+*/^×÷]", text):
        if match.group() == "(":
            open_brackets.append([0, 0])
        elif match.group() != ")":
            if open_brackets:
                open_brackets[-1][0] = 1
        elif open_brackets:
            levels = sum(open_brackets.pop())
            deepest = max(deepest, levels)
            if open_brackets:
                open_brackets[-1][1] = max(open_brackets[-1][1], levels)
    if operators >= 5 or deepest >= 2:
        return "high"
    return "medium" if operators >= 3 or deepest == 1 else "low"


def _closing(text: str) -> int:
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place
    return -1
