r"""Text as it is read: one form of line ends, of Unicode, of white space; and LaTeX and Markdown as plain text."""

from __future__ import annotations

import re
import unicodedata

MAX_RESPONSE = 50_000  # characters at the end of a response that are read

_CHARACTERS: dict[int, int | str | None] = {
    0xFF01 + i: 0x21 + i for i in range(94) if i not in (13,)
}  # full width; not the full stop
_CHARACTERS |= dict.fromkeys((0x85, 0x0B, 0x0C, 0x2028, 0x2029), "\n") | {
    0x3000: " ",
    0xFE63: "-",
    0x2212: "-",
    0x2011: "-",
    0x2010: "-",
}
_CHARACTERS |= dict.fromkeys(
    (
        *range(0x00, 0x09),
        *range(0x0E, 0x20),
        0x7F,
        *range(0x200B, 0x2010),
        *range(0x202A, 0x202F),
        *range(0x2060, 0x206A),
        0xFEFF,
    )
)
_CHARACTERS |= {0x201C: '"', 0x201D: '"', 0x2018: "'", 0x2044: "/", 0x2215: "/", 0xFFE5: "¥", 0x09: " "}
_FULL_STOP = re.compile(r"(?<!\d)．|．(?!\d)")  # a decimal point only between digits
_THOUGHTS = r"(?:think|thinking|thoughts?|reasoning|reflection|scratchpad|analysis|draft)"
_THOUGHT_END = re.compile(rf"</{_THOUGHTS}>", re.IGNORECASE)
_THOUGHT = re.compile(rf"<{_THOUGHTS}>", re.IGNORECASE)
_GAP = re.compile(r" {9,}|\n{9,}")
_SPECIAL = re.compile(r"<\|[\w ]{1,40}\|>|</?s>")  # tokens of a template


def clean(response: str) -> str:
    """The end of a response without what was thought, in one form of Unicode and of line ends."""
    text = response[-MAX_RESPONSE:].replace("\r\n", "\n").replace("\r", "\n")
    text = unicodedata.normalize("NFC", text.encode("utf-8", "ignore").decode("utf-8"))
    text = _FULL_STOP.sub("。", text).replace("．", ".").translate(_CHARACTERS)
    text = _GAP.sub(lambda found: found.group()[:8], text)
    ends = list(_THOUGHT_END.finditer(text))
    text = text[ends[-1].end() :] if ends else text
    return _SPECIAL.sub(" ", _THOUGHT.split(text, maxsplit=1)[0])


_WORDS = r"text(?:bf|rm|it|sf|tt|normal|up)?|math(?:bf|rm|it|sf|tt|bb|cal|normal)?|mbox|hbox|boldsymbol|bm|pmb|underline|emph|operatorname|boxed|fbox|bar|ensuremath|small|large"
_WRAPPER = re.compile(
    rf"\\(?:{_WORDS})\s*\{{([^{{}}]*)\}}|\\(?:text)?color\s*\{{[^{{}}]*\}}(?:\s*\{{([^{{}}]*)\}})?|\\(?:[hv]space\*?|tag|label)\s*\{{[^{{}}]*\}}"
)
_SWITCH = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|normalsize|small|large|Large|LARGE|huge|Huge|bf|rm|it|sf|tt|bfseries|boldmath|left|right|[bB]igg?[lrm]?|limits|nolimits|phantom|notag|nonumber|checkmark|blacksquare|square|Box|qed|qedhere)(?![A-Za-z])[.]?(?<!\\left\.)"
)
_UNITS = re.compile(r"\\[dt]?frac\s*\{\s*([A-Za-z ]+?)\s*\}\s*\{\s*([A-Za-z ]+?)\s*\}")
_QUOTED = re.compile(r"(?<![\w'])'([^'\n]{1,40})'(?!\w)")
_OVER = re.compile(r"\{\s*(-?[\d.]+)\s*\\over\s*([\d.]+)\s*\}")
_CYCLE = re.compile(r"(\d*\.\d*)\\(?:overline|dot|bar)\s*(?:\{\s*(\d{1,9})\s*\}|(\d))")
_STRUCK = re.compile(r"~~[^~\n]*~~|\\(?:cancel|sout|st)\s*\{[^{}]*\}")
_NOTE = re.compile(r"<<[^<>\n]*=[^<>\n]*>>")  # what a calculator did: <<3+4=7>>7
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*([-\d.,\s]+?)\s*\}|(\d))\s*(?:\{\s*([\d.,\s]+?)\s*\}|(\d))")
_SYMBOLS = {
    r"\\(?:begin|end)\s*\{(?:align|aligned|equation|gather|gathered|split)\*?\}": " ",
    r"\\(?:times|ast)(?![A-Za-z])": "×", r"\\cdot(?![A-Za-z])": "·", r"\\div(?![A-Za-z])": "÷", r"\\pm(?![A-Za-z])": "±",
    r"\\(?:approx|simeq|approxeq)(?![A-Za-z])": "≈", r"\\(?:leq?|leqslant)(?![A-Za-z])": "≤", r"\\(?:geq?|geqslant)(?![A-Za-z])": "≥",
    r"\\neq?(?![A-Za-z])|!=": "≠", r"∴": "⇒", r"<{1,2}(\s*-?[\d.,/]+\s*)>{1,2}": r" \1 ", r"\((-?\d+)\)/\((\d+)\)": r"(\1/\2)", r"\\lt(?![A-Za-z])": "<", r"\\gt(?![A-Za-z])": ">", r"\\(?:to|rightarrow|longrightarrow)(?![A-Za-z])": "→",
    r"\\(?:implies|Rightarrow|therefore)(?![A-Za-z])": "⇒", r"\\[lcd]?dots[a-z]?(?![A-Za-z])": "…",
    r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])": "°", r"\\(?=[%$#&_])": "", r"(?<=\d)\\[,;:](?=\d{3}(?!\d))|,\\!\s*": ",",
    r"\\\\(?:\[[^\]]*\])?|\\q?quad(?![A-Za-z])|\\newline(?![A-Za-z])": " ; ", r"\\[,!;: ]|~": " ", r"&\s*(?==)": "", r"\{\s*([-+])\s*\}": r"\1",
    r"(?<![A-Za-z\\])(?!(?:pi|sin|cos|tan|log|ln)\b)([A-Za-z]{2,}|[ms])(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d)|\s*[²³])": r"\1",
    r"(?<=[cdkm]m)[23](?!\w)|(?<=[\d\s]m)[23](?!\w)|(?<=ft)[23](?!\w)|(?<=\d)/-": "", r"\\(?:pounds|euro|textdollar|texteuro)(?![A-Za-z])": "$",
    r"</?[A-Za-z][A-Za-z0-9_]{0,15}(?:\s+[\w-]+=[\"'][^\"'<>\n]*[\"'])*\s*/?>|\\[()\[\]]|\$\$|(?<!\$)\$(?!\d)|(?<![\d)])\*\*+|\*\*+(?![-\d(n])|__|`+|<<|>>|[\"「」『』【】〔〕《》]": " ",
    r"(?<![\w)\]*])(?<![\w)\]] )[*_]+(?=\S)|(?<=[^\s*_])[*_]+(?![\w(\[{$.*_-]| ?[\d(n])": "", r"\.{3,}": "…",
}  # fmt: skip
_SYMBOLS_COMPILED = [(re.compile(pattern), replacement) for pattern, replacement in _SYMBOLS.items()]


def plain(text: str) -> str:
    r"""LaTeX, HTML and Markdown as plain text: words out of their wrappers, fractions, signs, degrees; units without exponents."""
    text = re.sub(r"\{,\}", ",", text)
    text = re.sub(r"(?<!\d)(\$|\\\()\s*-\s+(?=[\d\\.])", r"\1-", text)
    text = _NOTE.sub("", _STRUCK.sub(" ", text.replace("\\left.", " ").replace("\\right.", " ")))
    text = _OVER.sub(r"(\1/\2)", _CYCLE.sub(lambda found: f"{found[1]}({found[2] or found[3]})", _SWITCH.sub("", text)))
    for _ in range(6):  # from the inside out
        text, count = _WRAPPER.subn(lambda found: f" {found[1] or found[2] or ''} ", text)
        text, more = _FRACTION.subn(lambda f: f"({f[1] or f[2]}/{f[3] or f[4]})", text)
        if not count + more:
            break
    text = re.sub(r"(?m)[ \t]*(?:<-+(?=[ a-z])|←)[^\n]*$", "", text)
    text = _QUOTED.sub(r" \1 ", _UNITS.sub(r" \1/\2", text))
    for pattern, replacement in _SYMBOLS_COMPILED:
        text = pattern.sub(replacement, text)
    return text
