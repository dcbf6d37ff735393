r"""A mathematical answer taken apart as far as its form goes.

Lists and sets, tuples and intervals, unions, matrices, equations, inequalities, numbers in a base, words; what is left are single
expressions. Each form is one rule of `_RULES`, which are tried in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from lmeval_prune.scoring.normalisation import MAX_DEPTH, MAX_LENGTH, canonical, encloses, split, trimmed, values, words


@dataclass(frozen=True)
class Form:
    """An answer taken apart."""

    kind: str  # base, ratio, matrix, determinant, equation, list, tuple, relation, words, or single
    parts: tuple[Form | str, ...]  # texts are single expressions
    details: tuple[str, ...] = ()  # delimiters, the size of a matrix, a base


_Rule = Callable[[str, int], "Form | str | None"]
_ALTERNATIVES = (r"\text{ or }", " or ", r"\lor", r"\vee", "或")
_JOINTS = (",", ";", r"\text{ and }", " and ", "和", "、", *_ALTERNATIVES)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")  # words
_THOUSANDS = re.compile(r"(?<=\d),\s?(?=\d{3}(?!\d))")  # 12,000
_MEMBER_OF = re.compile(r"^\s*\\?[A-Za-z](?:_\{?\w\}?)?\s*\\in(?![A-Za-z])\s*(?=[(\[\\]|R\s*\\setminus)")  # x \in (
_INTEGER_NAME = re.compile(
    r"^(.*(?<![A-Za-z\\])([a-z])(?![A-Za-z]).*?)\s*,\s*(?:\\text\s*\{[^{}]*\}\s*)?\2\s*\\in\s*Z$"
)  # 2n\pi, n \in Z
# 52_8, 52 in base eight
_BASE = re.compile(r"\(?\s*(\d[0-9A-Za-z]*)\s*\)?\s*(?:_\s*[({\s]*(\w+)[)}\s]*|\s*(?:in )?base[ -](\w+))")
_BASES = values("bases")
_RATIO = re.compile(r"(\d+(?:\s*(?::|\bto\b)\s*\d+)+)\s*(?:([ap])\.?\s?m\.?)?")  # or a time
_MATRIX = re.compile(  # or a determinant
    r"^\\begin\{([pbvBV]?|small)(?:matrix|array)\}(?:\{[lcr|]*\})?([\s\S]*)\\end\{\1(?:matrix|array)\}$"
)
# -2 times a matrix
_SCALED = re.compile(r"(-|[^&\x01=,]{1,60}?)\s*(?:\\cdot|\\times)?\s*(\\begin\{[pb]matrix\}[\s\S]*\\end\{[pb]matrix\})")
_BRACKETS = [(r"\{", r"\}"), (r"\lbrace", r"\rbrace"), *((a, b) for a in "([" for b in ")]"), (r"\langle", r"\rangle")]
_SET_BRACKETS = (r"\{", r"\lbrace")
_INTEGER = r"-?\d{1,9}"
_DIFFERENCE = re.compile(  # R \setminus \{0\}
    rf"(?:R|([(\[])\s*({_INTEGER}|-\s*\\infty)\s*,\s*({_INTEGER}|\\infty)\s*([)\]]))"
    rf"\s*\\setminus\s*\\\{{\s*({_INTEGER}(?:\s*,\s*{_INTEGER}){{0,8}})\s*\\\}}"
)
_SUCH_THAT = re.compile(r"(?<!\|)\|(?!\|)|\\mid|:")
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")  # 3 \pm 2
_RELATION = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z])|[<>]")  # 3 < x
_LETTER = re.compile(r"[A-Za-z]")
_VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_\{?\w\}?)?")  # x_1, \alpha
# What may stand before = as the name of a value.
_NAMES = (
    r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\^\{?-1\}?)?'*(?:\s*\([^()=]*\))?",  # x, x_1, f(x), f^{-1}(x), f''
    r"\(\s*\\?[a-z]+(?:\s*,\s*\\?[a-z]+)+\s*\)",  # (x, y)
    r"\\(?:angle|triangle|measuredangle|overline|text|cos|sin|tan)\b[^=<>]*",
    r"\[[A-Z]{3,}\]",  # an area
    r"S_\{[^{}]*\}+",
    r"[A-Z](?:\s*\\(?:setminus|cup|cap)\s*[A-Z])+",  # A \setminus B
)
_ASSIGNED = re.compile(  # a name and what gives it a value
    rf"^\s*(?:\\text\s*\{{[^{{}}]*\}}\s*)*(?:{'|'.join(_NAMES)})\s*(?:=|\\in(?![A-Za-z])|:)\s*(?=\S)"
)
_SHORT_WORDS = words("short_words")


def form_of(text: str, depth: int = 0) -> Form | str:
    """Take an answer apart, down to `MAX_DEPTH` brackets in one another; return a single expression as its text."""
    if depth > MAX_DEPTH or len(text) > MAX_LENGTH:
        return text[: MAX_LENGTH + 1]
    text = _INTEGER_NAME.sub(r"\1", _MEMBER_OF.sub("", trimmed(text) if depth else canonical(text)))
    return next((form for rule in _RULES if (form := rule(text, depth)) is not None), _THOUSANDS.sub("", text))


def _forms(parts: Iterable[str], depth: int) -> tuple[Form | str, ...]:
    return tuple(form_of(part, depth + 1) for part in parts)


def _flat(text: str) -> str:
    return " ".join(_TEXT.sub(r" \1 ", text).split())


def _base(text: str, depth: int) -> Form | None:
    """Read `52_8` and `52 in base eight`."""
    base = _BASE.fullmatch(re.sub(r"(?<=\d) (?=[A-Z]\s*_)|\s*(?=_)", "", _flat(text)))
    name = str(_BASES.get((base[2] or base[3]).lower(), base[2] or base[3])) if base else ""
    return Form("base", (base[1].upper(),), (name,)) if base and name.isdigit() else None


def _ratio(text: str, depth: int) -> Form | None:
    """Read `3:4`, `3 to 4` and `5:45 pm`."""
    ratio = _RATIO.fullmatch(_flat(text).lower())
    return Form("ratio", tuple(re.findall(r"\d+", ratio[1])), (ratio[2] or "",)) if ratio else None


def _matrix(text: str, depth: int) -> Form | None:
    matrix = _MATRIX.match(text)
    if not matrix:
        return None
    rows = [split(row, "&") for row in matrix[2].split("\x01") if row.strip()]
    kind = "determinant" if matrix[1] in ("v", "V") else "matrix"
    size = (str(len(rows)), str(len(rows[0]) if rows else 0))
    return Form(kind, _forms((cell for row in rows for cell in row), depth), size)


def _scaled_matrix(text: str, depth: int) -> Form | None:
    """Read a number times a matrix as the matrix of the products."""
    scaled = _SCALED.fullmatch(text)
    matrix = form_of(scaled[2], depth + 1) if scaled else ""
    if not scaled or not isinstance(matrix, Form):
        return None
    factor = "-1" if scaled[1] == "-" else scaled[1]
    return Form(matrix.kind, tuple(f"({factor}) \\cdot ({part})" for part in matrix.parts), matrix.details)


def _assignment(text: str, depth: int) -> Form | None:
    """Read `x = 5`, `f(x) = 2x` and `5 = x`; the whole of `x = 1, y = 2` is a list."""
    sides = [side.strip() for side in split(text, "=")]
    if len(sides) != 2 or len(split(text, *_JOINTS)) > 1:
        return None
    return Form("equation", tuple(sides)) if is_name(sides[0]) or _LETTER.fullmatch(sides[1]) else None


def _union(text: str, depth: int) -> Form | str | None:
    """Read a union, to which the empty set adds nothing."""
    union = split(text, r"\cup")
    parts = [part for part in union if part.strip() != r"\emptyset"] or union[:1]
    if len(union) == 1:
        return None
    return Form("list", _forms(parts, depth), ("union",)) if len(parts) > 1 else form_of(parts[0], depth + 1)


def _difference(text: str, depth: int) -> Form | str | None:
    r"""Read an interval, or all reals, without some numbers as what is left: `R \setminus \{0\}`, `(1,8) \setminus \{2\}`."""
    difference = _DIFFERENCE.fullmatch(text)
    if not difference:
        return None
    opening, low, high, closing = ("(", r"-\infty", r"\infty", ")") if not difference[1] else difference.groups()[:4]
    start, end = (float(bound.replace(r"\infty", "inf").replace(" ", "")) for bound in (low, high))
    if start >= end:
        return None
    points = {int(part) for part in difference[5].split(",")}
    inside = sorted(point for point in points if start < point < end)
    opening, closing = "(" if start in points else opening, ")" if end in points else closing
    ends = [opening, *["("] * len(inside)], [*[")"] * len(inside), closing]
    parts = (f"{left}{a},{b}{right}" for (a, b), left, right in zip(pairwise([low, *inside, high]), *ends, strict=True))
    forms = _forms(parts, depth)
    return Form("list", forms, ("union",)) if inside else forms[0]


def _bracketed(text: str, depth: int) -> Form | str | None:
    """Read sets, tuples and intervals."""
    for opening, closing in _BRACKETS:
        if not (text.startswith(opening) and encloses(text, opening, closing)):
            continue
        inner = text[len(opening) : -len(closing)]
        items = split(inner, ",", ";")
        if opening in _SET_BRACKETS:
            if len(such_that := _SUCH_THAT.split(inner, maxsplit=1)) > 1:  # {x | x > 3}
                return _condition(such_that[1]) or Form("words", (text,))
            return Form("words", (text,)) if r"\emptyset" in inner else Form("list", _forms(items, depth), ("set",))
        if len(items) > 1:
            return Form("tuple", _forms(items, depth), (opening, closing))
        if opening in "([" and inner.strip().startswith("\\begin"):
            return form_of(inner, depth + 1)
    return None


def _condition(text: str) -> Form | None:
    """Read what holds for the members of a set: an inequality, or several of which one holds."""
    intervals = [_interval(part) for part in split(text, *_ALTERNATIVES)]
    if len(intervals) == 1:
        return intervals[0]
    return Form("list", tuple(filter(None, intervals)), ("union",)) if all(intervals) else None


def _list(text: str, depth: int) -> Form | str | None:
    """Read `1, 2 and 3`; but `20,000\\pi` is one expression."""
    items = [part for part in split(text, *_JOINTS) if part.strip()]
    if len(items) < 2:
        return None
    if re.search(r"\d$", items[0]) and all(re.fullmatch(r"\s*\d{3}(?:\D.*)?", item) for item in items[1:]):
        number = _THOUSANDS.sub("", text)
        if number != text:
            return form_of(number, depth + 1)
    return Form("list", _forms(items, depth))


def _plus_minus(text: str, depth: int) -> Form | None:
    if not _PLUS_MINUS.search(text) or r"\mp" in text:
        return None
    return Form("list", _forms((_PLUS_MINUS.sub(sign, text) for sign in "+-"), depth), ("pm",))


def _relation(text: str, depth: int) -> Form | None:
    if not _RELATION.search(text):
        return None
    sides = tuple(side.strip() for side in _RELATION.split(text))
    return _interval(text) or Form("relation", sides, tuple(_RELATION.findall(text)))


def _equation(text: str, depth: int) -> Form | None:
    return Form("equation", tuple(side.strip() for side in text.split("="))) if "=" in text else None


def _words(text: str, depth: int) -> Form | None:
    """Read an answer in words, in lower case."""
    flat = _TEXT.sub(r" \1 ", text)
    if flat == text and re.fullmatch(r"[a-z]{2,3}", text) and text not in _SHORT_WORDS:
        return None  # a product
    if re.search(r"[\\^_{}=<>+]|\d[A-Za-z]", flat) or not re.search(r"[A-Za-z]{2,}|^\W*[A-Z]\W*$", flat):
        return None
    letters = " ".join(re.sub(r"[^\w\s:/.-]", " ", flat).lower().split())
    return Form("words", (letters,)) if letters else None


_RULES: list[_Rule] = [
    _base, _ratio, _matrix, _scaled_matrix, _assignment, _union, _difference, _bracketed, _list, _plus_minus, _relation, _equation, _words,
]  # fmt: skip


# --------------------------------------------------------------------------- inequalities

_TURNED = str.maketrans("<>", "><")


def _interval(text: str) -> Form | None:
    """Read `3 < x \\le 4` as the interval (3,4], `x \\ge 2` as [2, ∞), `x \\ne 3` as two."""
    sides = [side.strip() for side in _RELATION.split(text)]
    signs = [{r"\le": "<=", r"\ge": ">="}.get(sign, sign) for sign in _RELATION.findall(text)]
    if len(sides) == 2 and all(sides):  # x < 2 as -∞ < x < 2
        if _VARIABLE.fullmatch(sides[1]) and not _VARIABLE.fullmatch(sides[0]):
            sides, signs = sides[::-1], [signs[0].translate(_TURNED)]
        sides = [r"-\infty" if signs[0][0] == "<" else r"\infty", *sides]
        signs = [signs[0] if signs == [r"\ne"] else signs[0][0], *signs]
    if len(sides) != 3 or not _VARIABLE.fullmatch(sides[1]):
        return None
    low, high = (sides[0], sides[2]) if signs[0][0] == "<" else (sides[2], sides[0])
    if r"\ne" in signs:
        return Form("list", _forms((rf"(-\infty,{low})", rf"({low},\infty)"), 0), ("union",))
    if signs[0][0] != signs[1][0]:
        return None
    closed = ["=" in sign for sign in (signs if signs[0][0] == "<" else signs[::-1])]
    return Form("tuple", _forms((low, high), 0), ("(["[closed[0]], ")]"[closed[1]]))


# --------------------------------------------------------------------------- equations


def is_name(side: str) -> bool:
    return _ASSIGNED.match(f"{side}=0") is not None


def assigned(form: Form | str) -> tuple[str, Form | str] | None:
    """Return the name and the value of an assignment, or the last of a chain of equal things; None of another equation.

    What is no equation is a value without a name.
    """
    if isinstance(form, str) or form.kind != "equation":
        return "", form
    sides = [str(part) for part in form.parts]
    if len(sides) == 2 and _LETTER.fullmatch(sides[1]) and not _LETTER.fullmatch(sides[0]):
        return sides[1], form_of(sides[0])
    if len(sides) > 2 or is_name(sides[0]) or not re.search(r"(?<![\\A-Za-z])[A-Za-z]", "".join(sides)):
        return sides[0], form_of(sides[-1])
    return (sides[-1], form_of(sides[0])) if is_name(sides[-1]) else None


def gives_several(text: str) -> bool:
    """Return whether an answer gives several values: a list, ±, or a name that is one of these."""
    form = form_of(text)
    _, value = assigned(form) or ("", form)
    return isinstance(value, Form) and value.kind == "list"
