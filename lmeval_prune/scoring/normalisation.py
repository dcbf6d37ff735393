r"""Words that answers are read by, and normalisation by rules: both are lists in `words/LANGUAGE.yaml`; `latex` is one.

An entry is a word, or a regular expression of words; `{{name}}` in it stands for any entry of another list. The stages of
normalisation are lists of rules, applied in their order:

response → clean (Unicode, line ends) → spelled (LaTeX in one spelling) → plain      words, numbers → arithmetic (expressions)
                                                                        → canonical  formulas
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

MAX_RESPONSE = 50_000  # characters at the end of a response that are read
MAX_LENGTH = 2000  # characters; longer answers are no answers
MAX_DEPTH = 8  # of brackets that are taken apart
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

# --------------------------------------------------------------------------- words

_FOLDER = Path(__file__).parent / "words"
_REFERENCE = re.compile(r"\{\{(\w+)\}\}")


@cache
def _lists() -> dict[str, dict[str, Any]]:
    """Read the lists of each language; `no` and `on` are words in them."""
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    return {path.stem: yaml.load(path.read_text("utf-8"), loader) for path in sorted(_FOLDER.glob("*.yaml"))}


def words(name: str) -> frozenset[str]:
    """Return the words of a list in all languages."""
    return frozenset(word for lists in _lists().values() for word in lists.get(name, ()))


def values(name: str) -> dict[str, int]:
    """Return the words of a list in all languages, each with its number."""
    return {word: int(number) for lists in _lists().values() for word, number in lists.get(name, {}).items()}


@cache
def phrases(name: str, language: str = "en") -> str:
    """Return a regular expression of all entries of a list in one language, or of the English one."""
    source = language if name in _lists()[language] else "en"
    entries = [_resolved(entry, language) for entry in _lists()[source][name]]
    return f"(?:{'|'.join(entries)})"


def _resolved(entry: str, language: str) -> str:
    return _REFERENCE.sub(lambda match: phrases(match[1], language), entry)


def pattern(name: str) -> re.Pattern[str]:
    """Compile all entries of a list in all languages, of English ones as whole words; in upper and lower case."""
    chinese = f"|{phrases(name, 'zh')}" if name in _lists()["zh"] else ""
    return re.compile(rf"\b{phrases(name)}\b{chinese}", re.IGNORECASE)


# --------------------------------------------------------------------------- stages


def stage(name: str, rounds: int = 1) -> Callable[[str], str]:
    """Return a stage that is listed with the words: its rules are applied in order, at most `rounds` times each."""
    entries = _lists()["latex"]["stages"][name]
    rules = [(re.compile(_resolved(entry, "latex")), replacement) for entry, replacement, _ in entries]

    def apply(text: str) -> str:
        for _ in range(rounds):
            before = text
            for rule, replacement in rules:
                text = rule.sub(replacement, text)
            if text == before:
                break
        return text

    return apply


# --------------------------------------------------------------------------- Unicode

_REMOVED = (
    *range(0x09), *range(0x0E, 0x20), 0x7F, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF
)  # fmt: skip  # control characters, zero width, direction
_CHARACTERS: dict[int, int | str | None] = {
    **{0xFF01 + i: 0x21 + i for i in range(94) if i != 13},  # full width; not the full stop
    **dict.fromkeys(_REMOVED),
    **dict.fromkeys((0x85, 0x0B, 0x0C, 0x2028, 0x2029), "\n"),
    **dict.fromkeys((*range(0x2600, 0x2776), 0x2B50, 0xFE0F, *range(0x1F000, 0x1FB00)), " "),  # emoji
    **dict.fromkeys((0xFE63, 0x2212, 0x2011, 0x2010), "-"),
    **str.maketrans("\u3000\t“”‘’⁄∕￥", "  \"\"''//¥"),
}
_FULL_STOP = re.compile(r"(?<!\d)．|．(?!\d)")  # a decimal point only between digits
_THOUGHT = re.compile(rf"(?i)(?P<end>{phrases('thought_ends', 'latex')})|{phrases('thought_begins', 'latex')}")
_GAP = re.compile(r"\s{9,}")  # long ones, which slow patterns down
_SPECIAL = re.compile(r"<\|[\w ]{1,40}\|>|</?s>")  # tokens of a template


def clean(response: str) -> str:
    """Return the end of a response without what was thought and white space around it, in one form of Unicode and line ends."""
    start, end = 0, len(response)
    for mark in _THOUGHT.finditer(response):
        start, end = (mark.end(), len(response)) if mark["end"] else (start, min(end, mark.start()))
    text = response[start:end][-MAX_RESPONSE:].replace("\r\n", "\n").replace("\r", "\n")
    text = unicodedata.normalize("NFC", text.encode("utf-8", "ignore").decode("utf-8"))
    text = _FULL_STOP.sub("。", text).replace("．", ".").translate(_CHARACTERS)
    return _SPECIAL.sub(" ", _GAP.sub(lambda gap: "\n" * min(gap.group().count("\n"), 8) or " " * 8, text)).strip()


# --------------------------------------------------------------------------- LaTeX in one spelling

_SIGNS: dict[str, list[str]] = _lists()["latex"]["signs"]
_COMMAND = re.compile(r"\\([A-Za-z]+)")  # \pi
_MARKUP = re.compile(r"[\\~<{]")  # without which there is nothing to spell
_RESPELLED = (
    {name: f"\\{names[0]}" for names in _SIGNS.values() for name in names}
    | {name: spelling for spelling, names in _lists()["latex"]["respelled"].items() for name in names}
    | dict.fromkeys(words("text"), r"\text")
    | dict.fromkeys(words("switches"), "")
)
_LAYOUT, _SPELLING = stage("layout"), stage("spelling", rounds=6)


def spelled(text: str) -> str:
    return _SPELLING(_replaced(_LAYOUT(text), _RESPELLED)) if _MARKUP.search(text) else text


def _replaced(text: str, commands: dict[str, str]) -> str:
    return _COMMAND.sub(lambda match: commands.get(match[1], match[0]), text)


# --------------------------------------------------------------------------- plain text

_NOT_PLAIN = frozenset("π∞∪∩∈θ∅|")  # commands in plain text, too: a number beside one is part of a formula
_PLAIN_COMMANDS = (
    {names[0]: sign for sign, names in _SIGNS.items() if sign not in _NOT_PLAIN}
    | dict.fromkeys(("quad", "qquad", "newline"), " ; ")
    | dict.fromkeys(("pounds", "euro", "textdollar", "texteuro"), "$")
)
_WORDS, _CONTENTS, _PLAIN = stage("words"), stage("contents", rounds=6), stage("plain")


def plain(text: str) -> str:
    """Return LaTeX, HTML and Markdown as plain text: words out of their wrappers, fractions, signs; units without exponents."""
    text = spelled(text)
    if "\\" in text:
        text = _CONTENTS(_replaced(_WORDS(text), _PLAIN_COMMANDS))
    return _PLAIN(text)


def line(text: str) -> str:
    return flat(plain(text))


def flat(text: str) -> str:
    return " ".join(text.split())


# --------------------------------------------------------------------------- canonical formulas

_INDICES = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789") | SUPERSCRIPTS
_CANONICAL_SIGNS = str.maketrans(
    {sign: f"\\{names[0]} " for sign, names in _SIGNS.items() if sign not in "<>|°"}
    | {"−": "-", "–": "-", "⋅": r"\cdot ", "∣": "|"}
    | {"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
)
_CANONICAL_COMMANDS = {"lt": "<", "gt": ">", "vert": "|", "quad": " , ", "qquad": " , "}
_CANONICAL = stage("canonical")
_SCALES = values("scales")
_SCALE = re.compile(rf"\\text\s*\{{\s*({'|'.join(_SCALES)})s?\s*\}}")  # \text{ million}
_MIXED = re.compile(r"(?<![\w.}^_{])(\d+) ?\\frac ?\{(\d+)\} ?\{(\d+)\}")  # 3\frac{1}{2}
_UNIT = re.compile(  # at the end: \text{ cm}^2, \text{ apples}
    rf"(?<=[\w}})\]])\s*\\text\s*\{{(?![^{{}}]*{phrases('no_unit', 'latex')})[^{{}}]*\}}(?:\s*\^\s*\{{?\s*\d\s*\}}?)?\s*$"
)


def canonical(text: str) -> str:
    """Return a formula without spaces and units at its end; of what is too long for an answer, the start."""
    text = _replaced(spelled(text[: MAX_LENGTH + 1]).translate(_CANONICAL_SIGNS), _CANONICAL_COMMANDS)
    text = _CANONICAL(_SCALE.sub(lambda scale: rf" \cdot {_SCALES[scale[1]]} ", text)).translate(_INDICES)
    text = _MIXED.sub(lambda m: f"({m[1]}+\\frac{{{m[2]}}}{{{m[3]}}})" if int(m[2]) < int(m[3]) else m[0], text)
    return trimmed(text)


def trimmed(text: str) -> str:
    """Return canonical LaTeX without stops, brackets and a unit around it."""
    text = text.strip(" .,;")
    for _ in range(MAX_DEPTH):
        if not encloses(text, "{"):
            break
        text = text[1:-1].strip(" .,;")
    return _UNIT.sub("", text) if not text.startswith("\\text") else text


# --------------------------------------------------------------------------- brackets

_PAIRS = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "\\lbrace": "\\rbrace", "\\langle": "\\rangle"}
_PIECE = re.compile(r"\\[A-Za-z]+|\\.|[\s\S]")  # a bracket, a command or a character
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
    return all(depth or not position for position, depth in _depths(text).items())


def split(text: str, *separators: str) -> list[str]:
    """Return the parts of a text between separators that stand in no bracket."""
    parts, start, depths = [], 0, _depths(text)
    for match in re.finditer("|".join(map(re.escape, separators)), text):
        is_word = match.group()[-1].isalpha() and text[match.end() : match.end() + 1].isalpha()
        if depths.get(match.start()) == 0 and match.start() >= start and not is_word:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]
