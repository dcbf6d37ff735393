"""Arithmetic expressions that models write: evaluated safely, and classed by complexity.

Nothing is executed: the text is parsed to a tree of numbers, names, + − × ÷ and powers, and computed with
exact fractions whose size is bounded. `9**9**9`, a million brackets and a division by zero have no value.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from lmeval_prune.scoring.plain import clean, plain

MAX_LENGTH = 400  # characters
MAX_BITS = 2048  # of a numerator or denominator
MAX_EXPONENT = 64

_SIGNS = str.maketrans({**dict.fromkeys("×·⋅∗•", "*"), **dict.fromkeys("÷∶", "/"), "—": "-", "[": "(", "]": ")"})
_BRACES = str.maketrans("{}", "()")
_UNITS = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}")
_NO_UNIT = r"(?:pi|sqrt|mod|plus|minus|less|times|factorial|negative|half|and|or)(?![A-Za-z])"
_OPERATOR = re.compile(r"\*\*|[-+*/^×÷]")
_SIGN = re.compile(r"(?<![\w).])[-+]|(?<=[-+*/^(])[-+]")
_NAME = re.compile(r"\s*[A-Za-z_]\w*\s*")


def _mixed(found: re.Match[str]) -> str:
    whole, _, top, bottom = found.groups()
    if int(top) >= int(bottom):  # 2(6/3) is a product
        return found.group()
    return f"({int(whole) * int(bottom) + int(top)}@{int(bottom)})"


# Read in this order. `a @ b` is a literal: a fraction that nobody has to compute (25%, the 1/2 of 3 1/2).
_LATEX = [
    (re.compile(r"[$;]"), " "),
    (re.compile(r"\((?:[\u4e00-\u9fff/]{1,9}|(?!pi\b)[A-Za-z]{2,}[A-Za-z ]{0,30})\)"), " "),  # units
    (re.compile(r"^[\sA-Za-z\u4e00-\u9fff]*(?::|[为是]|\b(?:is|have|get|gives|equals|obtain)\b)"), ""),  # the answer is
    (re.compile(r"\\pi(?![A-Za-z])|π|\bpi\b"), "(3.14)"),
    (re.compile(r"(?<![A-Za-z])n_\{?(\d+)\}?"), r"n\1"),
    (re.compile(r"\\times|\\cdot|\\ast"), "*"),
    (re.compile(r"\\div"), "/"),
    (re.compile(r"\{\s*([-+*/])\s*\}"), r"\1"),
    (re.compile(r"(?<=[\d)])\s*:\s*(?=[\d(n])"), "/"),
]
_FRAC = re.compile(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_STEPS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<![\w.])0+(?=\d)"), ""),  # 07, which Python refuses
    (re.compile(rf"(?<=[\d)%])\s+(?!{_NO_UNIT})[A-Za-z]{{3,}}(?=\s*[-+*/)])"), ""),  # unit words inside
    (
        re.compile(r"(?<=[\d)%])\s+[A-Za-z]{2,}\.?(?:\s+[A-Za-z]+\.?)*\s*\.?$|(?<=[\d)%])\s*[\u4e00-\u9fff]+$"),
        "",
    ),  # unit words at the end
    (re.compile(r"(?<![\w.)@])(\d+)(?:\s+|\s*(\())(\d+)\s*/\s*(\d+)(?(2)\))(?![\w.])"), _mixed),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*%"), r"(\1@100)"),
    (re.compile(r"(?<=[\d)])\s*[xX](?=\s+[\w(]|\d|\()|(?<=[\d)])\s*[xX]\s*(?=\d|\()"), "*"),
    (re.compile(r"(?<=[\d)])\s*(?=\()|(?<=\))\s*(?=\w)"), "*"),
]


def evaluate(text: str, names: Mapping[str, Fraction] | None = None) -> Fraction | None:
    r"""Value of an arithmetic expression, or None if it has none.

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
    """Whether an expression computes something: `3*4` and `7+2=9` do; `12`, `x=-5`, `25%` and `3 1/2` do not."""
    tree = _tree(text)
    return tree is not None and _computes(tree)


def is_division(text: str) -> bool:
    """Whether an expression is one division and computes nothing else."""
    tree = _tree(text)
    parts = _division(tree) if tree else []
    return bool(parts) and not any(map(_computes, parts))


def reduced_fraction(text: str) -> Fraction | None:
    """Value of a fraction of two whole numbers in lowest terms, the way a number is written: `1/4`, not `6/2`."""
    tree = _tree(text)
    parts = [_unsigned(part) for part in _division(tree)] if tree else []
    numbers = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, int)]
    if len(numbers) < 2 or numbers[1] < 2 or math.gcd(*numbers) > 1:
        return None
    return evaluate(text)


def _division(tree: ast.expr) -> list[ast.expr]:
    top = _unsigned(tree)
    return [top.left, top.right] if isinstance(top, ast.BinOp) and isinstance(top.op, ast.Div) else []


def _unsigned(tree: ast.expr) -> ast.expr:
    return tree.operand if isinstance(tree, ast.UnaryOp) else tree


def _computes(tree: ast.expr) -> bool:
    return any(isinstance(node, ast.BinOp) and not isinstance(node.op, ast.MatMult) for node in ast.walk(tree))


def _tree(text: str) -> ast.expr | None:
    """The side of an equation that computes something, the first such, else its only one that is no bare name."""
    if len(text) > MAX_LENGTH or "@" in text:  # before any pattern is tried on it
        return None
    sides = [tree for side in _plain(text).split("=") if (tree := _parsed(side))]
    values = [tree for tree in sides if not isinstance(tree, ast.Name)] or sides[-1:]
    return next(filter(_computes, sides), values[0] if len(values) == 1 else None)


def _parsed(side: str) -> ast.expr | None:
    for pattern, replacement in _STEPS:
        side = pattern.sub(replacement, side)
    try:
        return ast.parse(side.strip(), mode="eval").body if len(side) <= 2 * MAX_LENGTH else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _plain(text: str) -> str:
    r"""LaTeX as plain arithmetic; `\frac{}{}` from the inside out."""
    text = plain(_UNITS.sub(" ", clean(text)).strip(" \n*`_")).translate(_SIGNS)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    found = 1
    while found and len(text) <= 2 * MAX_LENGTH:
        text, found = _FRAC.subn(r"((\1)/(\2))", text)
    return text.translate(_BRACES).replace("^", "**").strip().rstrip(" .。")


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
        case ast.Div() | ast.MatMult():
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
    text = sides[1] if len(sides) > 1 and _NAME.fullmatch(sides[0]) else sides[0]
    text = re.sub(r"\s", "", text).replace("[", "(").replace("]", ")")
    while text.startswith("(") and _closing(text) == len(text) - 1:
        text = text[1:-1]
    text = _SIGN.sub("", text)
    operators = len(_OPERATOR.findall(text))
    deepest = 0
    open_brackets: list[list[int]] = []  # of each: holds an operator itself, levels of nesting inside
    for match in re.finditer(rf"[()]|{_OPERATOR.pattern}", text):
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
