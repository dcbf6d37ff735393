r"""When two mathematical answers are the same.

An answer is taken apart as far as its form goes: lists and sets, tuples and intervals, unions, matrices, equations, inequalities,
numbers in a base, words. Forms that differ are different answers (a tuple is no set, `\ge 9` no number); of equal ones the
parts are compared, and what is left, single expressions, by math-verify.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lmeval_prune.scoring.numbers import same_number
from lmeval_prune.scoring.prose import number_of
from lmeval_prune.scoring.verifier import Verdict, shared

MAX_LENGTH = 2000  # characters; longer answers are no answers
MAX_DEPTH = 8  # of brackets that are taken apart
MAX_PARTS = 40  # of a list or a matrix; more are compared in order only

_SPACES = re.compile(
    r"\\[,!;: ]|\\(?:thinspace|medspace|hfill|(?:display|text|script)style|limits|left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?"
    r"|^\s*\\(?:therefore|implies|Rightarrow|because)(?![A-Za-z])|\\(?:text)?color\s*\{\w+\}|~|\s+|\$|\\[()\[\]]|(?<![\w)}\]])\*\*|\*\*(?![\w({\\])|`"
)
_FONTS = "boxed|fbox|mathbf|mathrm|mathit|mathsf|boldsymbol|bm|underline|mathbb|operatorname|bf|rm"
_TENS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SIGNS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "θ": r"\theta ", "°": r"^\circ ", "…": r"\ldots ", "∅": r"\emptyset ", "∣": "|", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
}  # fmt: skip
_SAME: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\\(?:dfrac|tfrac|cfrac)(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:leq|leqslant)(?![A-Za-z])"), r"\\le "), (re.compile(r"\\(?:geq|geqslant)(?![A-Za-z])"), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne "), (re.compile(r"\\lt(?![A-Za-z])"), "<"), (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\(?:textbf|textit|textrm|textsf|textnormal|mbox|hbox|emph)(?![A-Za-z])"), r"\\text"),
    (re.compile(r"\\mathrm\s*\{\s*(cm|km|mm|m|kg|g|ft|in|s|mi|h|min)\s*\}"), r"\\text{\1}"), (re.compile(r"\\text\s*\{\s*,\s*(?:and|or)?\s*\}"), " , "),
    (re.compile(rf"\\(?:{_FONTS})\s*\{{([^{{}}]*)\}}"), r" \1 "), (re.compile(rf"\\(?:{_FONTS}|large|Large)(?![A-Za-z])"), ""),
    (re.compile(r"\\text\s*\{\s*(hundred|thousand|million|billion|trillion)s?\s*\}"), lambda found: rf" \cdot 10^{{{_TENS[found[1]]}}} "),
    (re.compile(r"\\text\s*\{\s*([:\d.]*)\s*\}|\{\s*(:)\s*\}|\\(colon)(?![A-Za-z])"), lambda f: f[1] or (":" if f[2] or f[3] else "")),
    (re.compile(r"\\[lr]?vert(?![A-Za-z])"), "|"), (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"), (re.compile(r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\bigcup(?![A-Za-z])"), r"\\cup"), (re.compile(r"(?<=[^\s])\s*(?:\\approx|≈)[^,;]*$"), ""),
    (re.compile(r"_\s*\\text\s*\{\s*(\w+)\s*\}"), r"_{\1}"), (re.compile(r"\\varnothing|\\\{\s*\\\}"), r"\\emptyset "), (re.compile(r"\\log\s*_\s*\{?\s*e\s*\}?"), r"\\ln "),
    (re.compile(r"(\\(?:sin|cos|tan|cot|sec|csc)\s*[({]?\s*)(-?[\d.]+)\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z]))"), r"\1\\frac{\2\\pi}{180}"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|\\text\s*\{\s*degrees?\s*\}|\bdegrees?\b"), ""),
    (re.compile(r"\\q?quad(?![A-Za-z])"), " , "),
    (re.compile(r"\\(?=[$%#])|\{,\}(?=\d{3})"), ""),
    (re.compile(r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"), (re.compile(r"\\sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*(\d+|\w)"), r"\\sqrt{\1}"), (re.compile(r"√"), r"\\sqrt"), (re.compile(r"\\sqrt\s*(\w)"), r"\\sqrt{\1}"), (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*\{"), r"\\frac{\1}{"), (re.compile(r"(\\frac\s*\{[^{}]*\})\s*(\d)"), r"\1{\2}"),
    (re.compile(r"(?<![A-Za-z\\])(pi|infty|infinity)(?![A-Za-z])"), lambda found: r"\infty " if found[1][0] == "i" else r"\pi "),
    (re.compile(r"\*\*"), "^"), (re.compile(r"\*"), r"\\cdot "), (re.compile(r"(?<=\d)!\s*(?=\d)"), ""),
    (re.compile(r"(?<![\w.}^_{])(\d+)\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}"), lambda f: f"({f[0]})".replace("\\", "+\\", 1) if int(f[2]) < int(f[3]) else f[0]),
    (re.compile(r"(?<![\w}])\{\s*(\w+)\s*\}(?=\s*_)"), r"\1"),
]  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_UNIT = re.compile(
    r"(?<=[\w})\]])\s*(?:\\text\s*\{(?![^{}]*(?:radian|[ap]\.?\s?m\b|factorial|squared|cubed|half|less|more|mod|pi\b|dozen))[^{}]*\}|\\(?:text)?(?:cm|km|mm|m|kg|g|ft|in|s)(?![A-Za-z]))(?:\s*\^\s*\{?\s*\d\s*\}?)?\s*$"
)
_NAME = r"(?:\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\^\{?-1\}?)?(?:\s*\([^()=]*\)|'*)?|\(\s*\\?[a-z]+(?:\s*,\s*\\?[a-z]+)+\s*\)|\\(?:angle|triangle|measuredangle|overline|text|cos|sin|tan)\b[^=<>]*|m\s*\\angle[^=<>]*|\[[A-Z]{3,}\]|\|[A-Za-z]+\||[A-Z]{2,}|S_\{[^{}]*\}+)"
_ASSIGNED = re.compile(rf"^\s*(?:\\text\s*\{{[^{{}}]*\}}\s*)*{_NAME}\s*(?:=|\\in(?![A-Za-z])|:)\s*(?=\S)")
_JOINTS = (",", ";", "\\text{ and }", "\\text{and}", "\\text{ or }", "\\text{or}", " and ", " or ", "\\lor", "\\vee")
_BASE = re.compile(r"\(?\s*(\d[0-9A-Za-z]*)\s*\)?\s*(?:_\s*[({\s]*(\w+)[)}\s]*|\s*(?:in )?base[ -](\w+))")
_RATIO = re.compile(r"(\d+(?:\s*(?::|\bto\b)\s*\d+)+)\s*(?:([ap])\.?\s?m\.?)?")  # or a time
_SCALED = re.compile(r"(-|[^&\x01=,]{1,60}?)\s*(?:\\cdot|\\times)?\s*(\\begin\{[pb]matrix\}[\s\S]*\\end\{[pb]matrix\})")
_BASES = dict(
    zip(
        ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
        map(str, range(2, 13)),
        strict=True,
    )
) | {"sixteen": "16"}
_PAIRS = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "\\lbrace": "\\rbrace", "\\langle": "\\rangle"}
_PIECE = re.compile(r"\\begin\{(\w+\*?)\}|\\end\{(\w+\*?)\}|\\[A-Za-z]+|\\.|[\s\S]")
_MATRIX = re.compile(
    r"^\\begin\{([pbvBV]?|small)(?:matrix|array)\}(?:\{[lcr|]*\})?([\s\S]*)\\end\{\1(?:matrix|array)\}$"
)
_RELATION = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z])|[<>]")
_FUNCTIONS = frozenset(
    [
    "sqrt", "frac", "pi", "infty", "cdot", "times", "div", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln",
    "exp", "arcsin", "arccos", "arctan", "theta", "alpha", "beta", "gamma", "phi", "lambda", "omega", "binom",
    "lfloor", "rfloor", "lceil", "rceil", "circ", "pm", "mp", "cap", "cup", "emptyset", "ldots", "cdots", "in",
    "angle", "triangle", "left", "right", "e", "i", "text", "overline", "bar", "hat", "vec", "mu", "sigma", "delta",
    "epsilon", "rho", "tau", "varphi"
    ]
)  # fmt: skip
_NO_EXPRESSION = re.compile(
    r"[\u4e00-\u9fff&;→⇒\x01]|\\(?:to|rightarrow|implies|ldots|cdots|dots|mod|pmod|bmod|quad|text)(?![A-Za-z])|\.\.\.|['′″\"]|(?<![\\A-Za-z])[A-Za-z]{4,}|\\begin|\\\\|\\(?:approx|sim)(?![A-Za-z])"
)


@dataclass(frozen=True)
class Form:
    """An answer taken apart: its kind and its parts (forms, or texts of single expressions)."""

    kind: str
    parts: tuple[Form | str, ...]
    rest: tuple[str, ...] = ()  # delimiters, the size of a matrix, a base


def tidy(text: str) -> str:
    """LaTeX in one spelling: without sizes, spaces and units at its end; of what is too long for an answer, the start."""
    text = text[: MAX_LENGTH + 1]
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda found: "^{" + found.group().translate(_RAISED) + "}", text)
    text = re.sub("[₀-₉]+", lambda found: "_{" + found.group().translate(_LOWERED) + "}", text)
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    text = re.sub(r"\\\\\s*(?:\[[^\]]*\])?", " \x01 ", text)  # rows
    text = _SPACES.sub(" ", text)
    for pattern, replacement in _SAME:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\s+", " ", text).strip(" .,;")
    for _ in range(MAX_DEPTH):
        if not _encloses(text, "{"):
            break
        text = text[1:-1].strip(" .,;")
    return _UNIT.sub("", text) if not text.startswith("\\text") else text


def form_of(text: str, depth: int = 0) -> Form | str:
    """Take an answer apart, down to `MAX_DEPTH` brackets in one another."""
    if depth > MAX_DEPTH or len(text) > MAX_LENGTH:
        return text[: MAX_LENGTH + 1]

    def inside(part: str) -> Form | str:
        return form_of(part, depth + 1)

    text = re.sub(r"^\s*\\?[A-Za-z](?:_\{?\w\}?)?\s*\\in(?![A-Za-z])\s*(?=[(\[\\])", "", tidy(text))
    flat = " ".join(re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).split())
    if base := _BASE.fullmatch(re.sub(r"(?<=\d) (?=[A-Z]\s*_)|\s*(?=_)", "", flat)):
        name = base[2] or base[3]
        number = _BASES.get(name.lower(), name)
        if number.isdigit():
            return Form("base", (base[1].upper(),), (number,))
    if ratio := _RATIO.fullmatch(flat.lower()):
        return Form("ratio", tuple(re.findall(r"\d+", ratio[1])), (ratio[2] or "",))
    if matrix := _MATRIX.match(text):
        rows = [row for row in matrix[2].split("\x01") if row.strip()]
        cells = [_split(row, "&") for row in rows]
        kind = "determinant" if matrix[1] in ("v", "V") else "matrix"
        return Form(
            kind,
            tuple(inside(cell) for row in cells for cell in row),
            (str(len(rows)), str(len(cells[0]) if cells else 0)),
        )
    if (scaled := _SCALED.fullmatch(text)) and isinstance(inner_matrix := inside(scaled[2]), Form):
        factor = "-1" if scaled[1] == "-" else scaled[1]
        return Form(
            inner_matrix.kind, tuple(f"({factor}) \\cdot ({part})" for part in inner_matrix.parts), inner_matrix.rest
        )
    sides = [side.strip() for side in _split(text, "=")]
    is_equation = len(sides) == 2 and len(_split(text, *_JOINTS)) == 1
    if is_equation and (_ASSIGNED.match(f"{sides[0]}=0") or re.fullmatch(r"[A-Za-z]", sides[1])):
        return Form("equation", tuple(sides))
    union = _split(text, "\\cup")
    if len(union) > 1:
        return Form("list", tuple(inside(part) for part in union), ("union",))
    for opening, closing in (
        ("\\{", "\\}"),
        ("\\lbrace", "\\rbrace"),
        ("(", ")"),
        ("[", "]"),
        ("(", "]"),
        ("[", ")"),
        ("\\langle", "\\rangle"),
    ):
        if text.startswith(opening) and text.endswith(closing) and _encloses(text, opening, closing):
            inner = text[len(opening) : -len(closing)]
            items = _split(inner, ",", ";")
            if opening in ("\\{", "\\lbrace"):
                if re.search(r"(?<!\|)\|(?!\|)|\\mid|:", inner):
                    return _interval(re.split(r"\||\\mid|:", inner, maxsplit=1)[1]) or Form("words", (text,))
                return (
                    Form("list", tuple(inside(part) for part in items), ("set",))
                    if "\\emptyset" not in inner
                    else Form("words", (text,))
                )
            if len(items) > 1:
                return Form("tuple", tuple(inside(part) for part in items), (opening, closing))
            if opening in "([" and closing in ")]" and inner.strip().startswith("\\begin"):
                return inside(inner)
    items = _split(text, *_JOINTS)
    items = [re.sub(r"^(?:\s|and\b|or\b|\\text\s*\{\s*(?:and|or)\s*\})*", "", item) for item in items]
    items = [item for item in items if item.strip()]
    if len(items) > 1:
        if all(re.fullmatch(r"\s*\d{3}(?:\D.*)?", item) for item in items[1:]) and re.search(r"\d$", items[0]):
            joined = re.sub(r"(?<=\d),\s?(?=\d{3}(?!\d))", "", text)  # 20,000\pi
            if joined != text:
                return inside(joined)
        return Form("list", tuple(inside(part) for part in items), ())
    if re.search(r"\\pm(?![A-Za-z])", text) and "\\mp" not in text:
        return Form("list", tuple(inside(re.sub(r"\\pm(?![A-Za-z])", sign, text)) for sign in ("+", "-")), ("pm",))
    if _RELATION.search(text):
        return _interval(text) or Form(
            "relation",
            tuple(part.strip() for part in _RELATION.split(text)),
            tuple(found.group() for found in _RELATION.finditer(text)),
        )
    if "=" in text:
        return Form("equation", tuple(part.strip() for part in text.split("=")))
    if words := _words(text):
        return Form("words", (words,))
    return re.sub(r"(?<=\d),\s?(?=\d{3}(?!\d))", "", text)


def _encloses(text: str, opening: str, closing: str = "") -> bool:
    """Whether the first delimiter is closed by the last one."""
    closing = closing or _PAIRS[opening]
    if not (text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing)):
        return False
    depth = 0
    pieces = [piece.group() for piece in _PIECE.finditer(text)]
    for place, piece in enumerate(pieces):
        depth += (piece in _PAIRS or piece.startswith("\\begin")) - (
            piece in _PAIRS.values() or piece.startswith("\\end")
        )
        if depth == 0:
            return place == len(pieces) - 1
    return False


def _split(text: str, *separators: str) -> list[str]:
    """Parts of a text between separators that stand in no bracket."""
    parts, start, depth, place = [], 0, 0, 0
    while place < len(text):
        if depth == 0 and (found := next((s for s in separators if text.startswith(s, place)), None)):
            follows = text[place + len(found) : place + len(found) + 1]
            if not (found[-1].isalpha() and follows.isalpha()):
                parts.append(text[start:place])
                place = start = place + len(found)
                continue
        piece = _PIECE.match(text, place)
        assert piece
        opens = piece.group() in _PAIRS or piece.group().startswith("\\begin")
        closes = piece.group() in _PAIRS.values() or piece.group().startswith("\\end")
        depth = max(0, depth + opens - closes)
        place = piece.end()
    return [*parts, text[start:]]


def _interval(text: str) -> Form | None:
    """`3 < x \\le 4` as the interval (3,4], `x \\ge 2` as [2, ∞), `x \\ne 3` as two."""
    sides = [side.strip() for side in _RELATION.split(text)]
    relations = [
        "<=" if "le" in r else ">=" if "ge" in r else "!=" if "ne" in r else r
        for r in (f.group() for f in _RELATION.finditer(text))
    ]
    name = re.compile(r"\\?[A-Za-z]+(?:_\{?\w\}?)?")
    if len(sides) == 3 and name.fullmatch(sides[1]) and relations[0][0] == relations[1][0] in "<>":
        (low, high), (first, second) = (sides[0], sides[2]), relations
        if first[0] == ">":
            low, high, first, second = high, low, second.replace(">", "<"), first.replace(">", "<")
        return Form(
            "tuple", (form_of(low), form_of(high)), ("[" if "=" in first else "(", "]" if "=" in second else ")")
        )
    if len(sides) == 2:
        if name.fullmatch(sides[1]) and not name.fullmatch(sides[0]):
            sides, relations = sides[::-1], [relations[0].translate(str.maketrans("<>", "><"))]
        if not name.fullmatch(sides[0]) or not sides[1]:
            return None
        bound = form_of(sides[1])
        if relations[0] == "!=":
            parts = (Form("tuple", ("-\\infty", bound), ("(", ")")), Form("tuple", (bound, "\\infty"), ("(", ")")))
            return Form("list", parts, ("union",))
        if relations[0][0] == "<":
            return Form("tuple", ("-\\infty", bound), ("(", "]" if "=" in relations[0] else ")"))
        return Form("tuple", (bound, "\\infty"), ("[" if "=" in relations[0] else "(", ")"))
    return None


_SHORT_WORDS = frozenset(["no", "yes", "odd", "all", "one", "two", "six", "ten", "sun", "mon", "cat", "dog", "red"])


def _words(text: str) -> str:
    """An answer in words, in lower case; empty if it is none."""
    flat = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    if flat == text and re.fullmatch(r"[a-z]{2,3}", text) and text not in _SHORT_WORDS:
        return ""  # a product
    if re.search(r"[\\^_{}=<>+]|\d[A-Za-z]", flat) or not re.search(r"[A-Za-z]{2,}|^\W*[A-Z]\W*$", flat):
        return ""
    return " ".join(re.sub(r"[^\w\s:/.-]", " ", flat).lower().split())


# --------------------------------------------------------------------------- comparing

Leaf = Callable[[str, str], "bool | None"]  # None: not known yet
_NEUTRAL = frozenset(
    [
    "the", "a", "an", "is", "it", "are", "of", "due", "function", "number", "point", "graph", "choice", "option",
    "answer", "line", "side", "value", "only", "exactly", "on", "in", "at", "by", "to"
    ]
)  # fmt: skip


def compare(answer: Form | str, gold: Form | str, leaf: Leaf) -> bool | None:
    """Whether two forms are the same; None while a single expression's comparison is not known."""
    if isinstance(answer, str) and isinstance(gold, str):
        return leaf(answer, gold)
    a = answer if isinstance(answer, Form) else Form("single", (answer,))
    g = gold if isinstance(gold, Form) else Form("single", (gold,))
    if "\\langle" in (*a.rest, *g.rest):  # a vector is written as a tuple or a column, too
        a, g = (Form("tuple", form.parts, ("(", ")")) if _is_vector(form) else form for form in (a, g))
    if "ratio" in (a.kind, g.kind):
        return a.kind == g.kind and a.parts == g.parts and (a.rest == g.rest or ("",) in (a.rest, g.rest))
    if "equation" in (a.kind, g.kind):
        named = [_named(form) if form.kind == "equation" else ("", form) for form in (a, g)]
        if None in named:
            return leaf(*("=".join(map(str, form.parts)) for form in (a, g))) if a.kind == g.kind else False
        (name, value), (gold_name, gold_value) = ((str(pair[0]), pair[1]) for pair in named if pair)
        if _kind_of_name(name) == _kind_of_name(gold_name) and _bare(name) != _bare(gold_name):  # x = 5 is not y = 5
            return False
        return compare(value, gold_value, leaf)
    if "list" in (a.kind, g.kind):
        return _same_lists(a, g, leaf)
    if "base" in (a.kind, g.kind):
        return _same_bases(a, g)
    if "words" in (a.kind, g.kind):
        return (
            _same_words(str(a.parts[0]), str(g.parts[0])) if a.kind == g.kind else _same_words(_text_of(a), _text_of(g))
        )
    if a.kind != g.kind or a.rest != g.rest or len(a.parts) != len(g.parts):
        return False
    return _every(compare(x, y, leaf) for x, y in zip(a.parts, g.parts, strict=True))


def _is_vector(form: Form) -> bool:
    return form.rest[:1] in (("\\langle",), ("(",)) or (form.kind == "matrix" and "1" in form.rest)


def _named(form: Form) -> tuple[str, Form | str] | None:
    """The name and the value of an assignment, or the last of a chain of equal things; None of another equation."""
    parts = [str(part) for part in form.parts]
    if len(parts) == 2 and re.fullmatch(r"[A-Za-z]", parts[1]) and not re.fullmatch(r"[A-Za-z]", parts[0]):
        return parts[1], form_of(parts[0])
    if len(parts) > 2 or _ASSIGNED.match(f"{parts[0]}=0") or not re.search(r"(?<![\\A-Za-z])[A-Za-z]", "".join(parts)):
        return parts[0], form_of(parts[-1])
    if _ASSIGNED.match(f"{parts[-1]}=0"):
        return parts[-1], form_of(parts[0])
    return None


def _bare(name: str) -> str:
    return re.sub(r"[\s{}]", "", name)


def _kind_of_name(name: str) -> str:
    """What names are alike that say different things: x and y, f(x) and g(x), AB and CD."""
    kind = re.sub(r"\\(?:sin|cos|tan|cot|sec|csc|log|ln)(?![A-Za-z])", "\\\\f", _bare(name))
    return "words" if "\\text" in kind else re.sub(r"(?<!\\)[A-Za-z]", "a", re.sub(r"\d+", "1", kind))


def _text_of(form: Form) -> str:
    return str(form.parts[0]) if form.kind in ("single", "words") else ""


def _same_words(answer: str, gold: str) -> bool:
    """Equal but for words that say nothing; of a choice, its letter."""
    words, golds = (
        [
            word.strip(".:-()")
            for word in text.replace("\\text", " ").replace("{", " ").replace("}", " ").lower().split()
        ]
        for text in (answer, gold)
    )
    golds = [word for word in golds if word]
    if len(golds) == 1 and re.fullmatch(r"[a-k]", golds[0]):  # (C) 12
        if any(re.fullmatch(r"[b-k]", word) and word != golds[0] for word in words):
            return False
        return (
            bool(words)
            and next((w for w in words if w and (w not in _NEUTRAL or w == golds[0])), "") == golds[0]
            and len(words) <= 6
        )
    extra = [word for word in words if word and word not in golds]
    return (
        bool(golds)
        and "".join(golds) == "".join(w for w in words if w in golds or w not in _NEUTRAL)
        and all(word in _NEUTRAL for word in extra)
    )


def _same_bases(answer: Form, gold: Form) -> bool:
    digits = [
        str(form.parts[0]).upper() if form.kind == "base" else re.sub(r"[\s,]", "", _text_of(form)).upper()
        for form in (answer, gold)
    ]
    if digits[0] != digits[1]:
        return False
    bases = [form.rest[0] if form.kind == "base" else None for form in (answer, gold)]
    return bases[0] == bases[1] or (bases[0] is None) or (bases[1] is None and bases[0] == "10")


def _same_lists(answer: Form, gold: Form, leaf: Leaf) -> bool | None:
    """In any order. A set is a list, but no tuple; one thing is a list of one."""
    ours_by_name, theirs_by_name = _by_name(answer), _by_name(gold)
    if ours_by_name and theirs_by_name and ours_by_name.keys() == theirs_by_name.keys():  # a = 1, b = 2
        return _every(compare(value, theirs_by_name[name], leaf) for name, value in ours_by_name.items())
    ordered = {"tuple", "matrix", "determinant"}
    if {answer.kind, gold.kind} & ordered and "union" not in (*answer.rest, *gold.rest):
        return False
    ours, theirs = (
        form.parts if form.kind == "list" else (form if form.kind != "single" else form.parts[0],)
        for form in (answer, gold)
    )
    ours, theirs = tuple(_unpacked(ours)), tuple(_unpacked(theirs))
    if len(ours) != len(theirs) or len(ours) > MAX_PARTS:
        return False
    unknown = False
    left = list(theirs)
    for part in ours:
        results = [compare(part, other, leaf) for other in left]
        if True in results:
            left.pop(results.index(True))
        elif None in results:
            unknown = True
        else:
            return False
    return None if unknown else True


def _by_name(form: Form) -> dict[str, Form | str]:
    """Values of a list of assignments to different names; empty for another list."""
    named = [_named(part) if isinstance(part, Form) and part.kind == "equation" else None for part in form.parts]
    found = {_bare(str(one[0])): one[1] for one in named if one}
    return found if form.kind == "list" and len(found) == len(form.parts) > 1 else {}


def _unpacked(parts: Sequence[Form | str]) -> list[Form | str]:
    """`x = 1, x = 2` as 1, 2; lists in a list (of ±) as their members."""
    found: list[Form | str] = []
    for part in parts:
        if isinstance(part, Form) and part.kind == "equation" and (named := _named(part)):
            part = named[1]
        found += _unpacked(part.parts) if isinstance(part, Form) and part.kind == "list" else [part]
    return found


def _every(results: Iterable[bool | None]) -> bool | None:
    known = list(results)
    return False if False in known else None if None in known else True


# --------------------------------------------------------------------------- verdicts

_KNOWN: dict[tuple[str, str], Verdict] = {}  # of pairs of expressions, what workers have found


def verdicts(pairs: Iterable[tuple[str, str]]) -> list[Verdict]:
    """Of (answer, gold) pairs, whether they are the same; what needs math-verify over all workers at once and only once."""
    pairs = list(pairs)
    forms = {text: form_of(text) for pair in pairs for text in pair}
    for _ in range(2):
        needed: dict[tuple[str, str], None] = {}
        found = [_verdict(answer, gold, forms, needed) for answer, gold in pairs]
        if not needed:
            return found
        _KNOWN.update(zip(needed, shared().verify_many([(gold, answer) for answer, gold in needed]), strict=True))
    return [_verdict(answer, gold, forms, {}) for answer, gold in pairs]


def _verdict(answer: str, gold: str, forms: dict[str, Form | str], needed: dict[tuple[str, str], None]) -> Verdict:
    if not answer.strip() or len(answer) > MAX_LENGTH:
        return "different"
    failed: list[Verdict] = []

    def leaf(one: str, other: str) -> bool | None:
        easy = easy_verdict(one, other)
        if easy is not None:
            return easy
        known = _KNOWN.get((one, other))
        if known is None:
            needed[one, other] = None
            return None
        if known in ("timeout", "crash"):
            failed.append(known)
        return known == "equal"

    if "pi" in gold:
        answer = re.sub(r"\\text\s*\{\s*rad(?:ians?)?\s*\}|\bradians?\b", "", answer)
    if "pi" in gold and "pi" not in answer and re.search(r"\\circ|°|degree", answer):  # in radians
        answer = f"\\frac{{\\pi}}{{180}} ({tidy(answer)})"
    forms = forms | {answer: form_of(answer)} if answer not in forms else forms
    numbers = number_of(answer), number_of(gold)
    if numbers[0] and numbers[1] and not ("=" in answer and "=" in gold):
        return "equal" if same_number(numbers[0], numbers[1], exact=True) else "different"
    same = compare(forms[answer], forms[gold], leaf)
    if same:
        return "equal"
    return failed[0] if failed and same is False else "different"


def easy_verdict(answer: str, gold: str) -> bool | None:
    """What can be said of two expressions without a worker."""
    keys = [re.sub(r"(?<!\d)\s+|\s+(?!\d)|\\(?:cdot|times)(?=\s*[^\s\\\d])", "", text) for text in (answer, gold)]
    if keys[0] == keys[1]:
        return bool(keys[0])
    numbers = number_of(answer), number_of(gold)
    if numbers[0] and numbers[1]:
        return same_number(numbers[0], numbers[1], exact=True)
    commands = {command for text in (answer, gold) for command in re.findall(r"\\([A-Za-z]+)", text)}
    if not commands <= _FUNCTIONS or any(_NO_EXPRESSION.search(text) or not text.strip() for text in (answer, gold)):
        return False
    return None


def same_mathematics(answer: str, other: str) -> bool:
    """Whether two answers are the same, `other` as the gold one."""
    return verdicts([(answer, other)])[0] == "equal"


def forget_failures() -> None:
    """Let `verdicts` try again what timed out or crashed."""
    for pair in [pair for pair, verdict in _KNOWN.items() if verdict in ("timeout", "crash")]:
        del _KNOWN[pair]
