r"""One form of text: of Unicode and line ends (`clean`), LaTeX and Markdown as plain text (`plain`), LaTeX in one spelling (`canonical`).

All three use one table of signs and one of wrappers. Rules are applied in their order.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable

from lmeval_prune.scoring.vocabulary import listed_rules, phrases, values, words, words_by_key

MAX_RESPONSE = 50_000  # characters at the end of a response that are read
MAX_LENGTH = 2000  # characters; longer answers are no answers
MAX_DEPTH = 8  # of brackets that are taken apart
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

Rule = tuple[re.Pattern[str], "str | Callable[[re.Match[str]], str]"]


def rules(*pairs: tuple[str, str | Callable[[re.Match[str]], str]]) -> list[Rule]:
    """Compile patterns and their replacements."""
    return [(re.compile(pattern), replacement) for pattern, replacement in pairs]


def rewrite(text: str, steps: Iterable[Rule]) -> str:
    """Apply rules in their order."""
    for pattern, replacement in steps:
        text = pattern.sub(replacement, text)
    return text


# --------------------------------------------------------------------------- Unicode

_REMOVED = (
    *range(0x09), *range(0x0E, 0x20), 0x7F, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF
)  # fmt: skip  # control characters, zero width, direction
_CHARACTERS: dict[int, int | str | None] = {
    **{0xFF01 + i: 0x21 + i for i in range(94) if i != 13},  # full width; not the full stop
    **dict.fromkeys(_REMOVED),
    **dict.fromkeys((0x85, 0x0B, 0x0C, 0x2028, 0x2029), "\n"),
    **dict.fromkeys((0xFE63, 0x2212, 0x2011, 0x2010), "-"),
    **str.maketrans("\u3000\t“”‘’⁄∕￥", "  \"\"''//¥"),
}
_FULL_STOP = re.compile(r"(?<!\d)．|．(?!\d)")  # a decimal point only between digits
_THOUGHT = re.compile(
    r"<(/?)(?:think|thinking|thoughts?|reasoning|reflection|scratchpad|analysis|draft)>", re.IGNORECASE
)
_GAP = re.compile(r" {9,}|\n{9,}")
_SPECIAL = re.compile(r"<\|[\w ]{1,40}\|>|</?s>")  # tokens of a template


def clean(response: str) -> str:
    """Return the end of a response without what was thought, in one form of Unicode and of line ends."""
    text = response[-MAX_RESPONSE:].replace("\r\n", "\n").replace("\r", "\n")
    text = unicodedata.normalize("NFC", text.encode("utf-8", "ignore").decode("utf-8"))
    text = _FULL_STOP.sub("。", text).replace("．", ".").translate(_CHARACTERS)
    text = _GAP.sub(lambda gap: gap.group()[:8], text)
    start, end = 0, len(text)
    for tag in _THOUGHT.finditer(text):
        if tag[1]:
            start, end = tag.end(), len(text)
        else:
            end = min(end, tag.start())
    return _SPECIAL.sub(" ", text[start:end])


# --------------------------------------------------------------------------- LaTeX

_SIGNS = words_by_key("signs", "latex")
_TEXT, _FONTS, _FRAC = (phrases(name, "latex") for name in ("text", "fonts", "frac"))
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_NOT_PLAIN = frozenset("π∞∪∩∈θ∅|")  # commands in plain text, too: a number beside one is part of a formula
_PLAIN_COMMANDS = (
    {name: sign for sign, names in _SIGNS.items() if sign not in _NOT_PLAIN for name in names}
    | dict.fromkeys(("quad", "qquad", "newline"), " ; ")
    | dict.fromkeys(("pounds", "euro", "textdollar", "texteuro"), "$")
    | dict.fromkeys(words("switches"), "")
)
_PLAIN_FIRST, _PLAIN_LAST = rules(*listed_rules("plain_first")), rules(*listed_rules("plain_last"))
_WRAPPERS = rules(  # from the inside out
    (
        rf"\\(?:{_TEXT}|{_FONTS}|bar)\s*\{{([^{{}}]*)\}}"
        r"|\\(?:text)?color\s*\{[^{}]*\}(?:\s*\{([^{}]*)\})?"
        r"|\\(?:[hv]space\*?|tag|label)\s*\{[^{}]*\}",
        lambda match: f" {match[1] or match[2] or ''} ",
    ),
    (rf"{_FRAC}(?:\{{\s*(-?[\d.,\s]+?)\s*\}}|(\d))\s*(?:\{{\s*([\d.,\s]+?)\s*\}}|(\d))", r"(\1\2/\3\4)"),
)


def _commands(text: str, table: dict[str, str]) -> str:
    """Replace commands by what a table says; others stay."""
    return _COMMAND.sub(lambda match: table.get(match[1], match[0]), text)


def plain(text: str) -> str:
    """Return LaTeX, HTML and Markdown as plain text: words out of their wrappers, fractions, signs; units without exponents."""
    text = _commands(rewrite(text, _PLAIN_FIRST), _PLAIN_COMMANDS)
    for _ in range(6):
        inner = rewrite(text, _WRAPPERS)
        if inner == text:
            break
        text = inner
    return rewrite(text, _PLAIN_LAST)


_CANONICAL_SIGNS = str.maketrans(
    {sign: f"\\{names[0]} " for sign, names in _SIGNS.items() if sign not in "<>|≈→⇒°"}
    | {"−": "-", "–": "-", "⋅": r"\cdot ", "∣": "|", "°": r"^\circ "}
    | {"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
)
_CANONICAL_COMMANDS = (
    dict.fromkeys(words("text"), r"\text")
    | {name: f"\\{names[0]} " for sign, names in _SIGNS.items() if sign in "≤≥≠∪∅" for name in names}
    | {name: sign for sign, names in _SIGNS.items() if sign in "<>|" for name in names}
    | {name: canonical for canonical, names in words_by_key("canonical_commands", "latex").items() for name in names}
    | dict.fromkeys(words("switches"), "")
)
_CANONICAL_FIRST = rules(
    ("[⁰¹²³⁴-⁹⁻]+", lambda match: "^{" + match.group().translate(SUPERSCRIPTS) + "}"),
    ("[₀-₉]+", lambda match: "_{" + match.group().translate(_SUBSCRIPTS) + "}"),
    *listed_rules("canonical_spaces"),
)
_SCALES = values("scales")
_CANONICAL_LAST = rules(
    (rf"\\text\s*\{{\s*({'|'.join(_SCALES)})s?\s*\}}", lambda match: rf" \cdot {_SCALES[match[1]]} "),
    *listed_rules("canonical"),
    (
        r"(?<![\w.}^_{])(\d+) ?\\frac ?\{(\d+)\} ?\{(\d+)\}",  # a mixed number
        lambda m: f"({m[1]}+\\frac{{{m[2]}}}{{{m[3]}}})" if int(m[2]) < int(m[3]) else m[0],
    ),
)
_UNIT = re.compile(
    rf"(?<=[\w}})\]])\s*(?:\\text\s*\{{(?![^{{}}]*{phrases('no_unit', 'latex')})[^{{}}]*\}}"
    rf"|\\(?:text)?{phrases('unit_symbols', 'latex')}(?![A-Za-z]))(?:\s*\^\s*\{{?\s*\d\s*\}}?)?\s*$"
)


def canonical(text: str) -> str:
    """Return LaTeX in one spelling, without sizes, spaces and units at its end; of what is too long for an answer, the start."""
    text = rewrite(text[: MAX_LENGTH + 1].translate(_CANONICAL_SIGNS), _CANONICAL_FIRST)
    text = rewrite(_commands(text, _CANONICAL_COMMANDS), _CANONICAL_LAST).strip(" .,;")
    for _ in range(MAX_DEPTH):
        if not encloses(text, "{"):
            break
        text = text[1:-1].strip(" .,;")
    return _UNIT.sub("", text) if not text.startswith("\\text") else text


# --------------------------------------------------------------------------- brackets

_PAIRS = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "\\lbrace": "\\rbrace", "\\langle": "\\rangle"}
_PIECE = re.compile(r"\\(?:begin|end)(?=\{\w+\*?\})|\\[A-Za-z]+|\\.|[\s\S]")
_DEEPENS = dict.fromkeys(_PAIRS, 1) | dict.fromkeys(_PAIRS.values(), -1) | {"\\begin": 1, "\\end": -1}


def _depths(text: str) -> dict[int, int]:
    """Return where each character or command of a text begins, and in how many brackets it stands."""
    depths, depth = {}, 0
    for piece in _PIECE.finditer(text):
        depths[piece.start()] = depth
        depth = max(0, depth + _DEEPENS.get(piece.group(), 0))
    return depths


def encloses(text: str, opening: str, closing: str = "") -> bool:
    """Return whether the first delimiter is closed by the last one."""
    closing = closing or _PAIRS[opening]
    if not (text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing)):
        return False
    return all(depth or not at for at, depth in _depths(text).items())


def split(text: str, *separators: str) -> list[str]:
    """Return the parts of a text between separators that stand in no bracket."""
    parts, start, depths = [], 0, _depths(text)
    for match in re.finditer("|".join(map(re.escape, separators)), text):
        is_word = match.group()[-1].isalpha() and text[match.end() : match.end() + 1].isalpha()
        if depths.get(match.start()) == 0 and match.start() >= start and not is_word:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]
