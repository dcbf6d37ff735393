r"""A text cut into tokens: digits, words, signs, brackets and stops, each with its kind."""

from __future__ import annotations

import re
from typing import NamedTuple

SPACES = "\u00a0\u2007\u2009\u202f"  # between groups of digits
_VULGAR = "".join(map(chr, (*range(0xBC, 0xBF), *range(0x2150, 0x215F))))  # ¼ ½ ¾ ⅐ …
_GROUPED = rf"""[1-9]\d{{0,2}}(?:
      (?:,\d{{3}})+ | (?:_\d{{3}})+ | (?:['’]\d{{3}})+ | (?:[{SPACES} ]\d{{3}})+ | (?:,\d\d)+,\d{{3}}  # the last is Indian
    )(?!\d)"""
_TOKEN = re.compile(
    rf"""
      (?P<digits> \d*\.\d*\(\d{{1,9}}\)(?!\w) | (?:{_GROUPED} | \d+)(?:\.\d+)? | \.\d+ )  # 0.1(6) is 0.1666…
      (?:[eE](?P<exponent>[-+]?\d{{1,3}})(?![A-Za-z\d]))?
    | (?P<vulgar>[{_VULGAR}])
    | (?P<money>(?:(?<![A-Za-z])(?:US|AU|CA|NZ|HK|NT|[ACRS]))?\$|[€£¥₹₩₽]|(?<![A-Za-z])Rs\.?(?=\s?\d))
    | (?P<word>[A-Za-z]+(?:['’][A-Za-z]+)*)
    | (?P<scale>(?:(?<=\d)|(?<=\d[ ]))(?!千米|千克|千瓦|百分|千分)(?:[百千万]?万|亿|[百千]))
    | (?P<chinese>[\u4e00-\u9fff]+)
    | (?P<raised>[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)
    | (?P<command>\\[A-Za-z]+)
    | (?P<arrow>[-=]{{1,3}}>|[→⇒])
    | (?P<equals>:=|[=≈≃≅≡])
    | (?P<relation><=|>=|[<>≤≥≠])
    | (?P<minus>[-\u2010\u2011\u2212\u2013\u2014])
    | (?P<operator>\*\*|[+*/⁄^×·⋅∙÷√±∓|∪∩&_])
    | (?P<open>[(\[{{])
    | (?P<close>[)\]}}])
    | (?P<percent>[%％])
    | (?P<degree>°)
    | (?P<stop>[,;:.!?，、。；：！？\n…])
    | (?P<other>\S)
    """,
    re.VERBOSE,
)


class Token(NamedTuple):
    """A piece of a text: its kind, where it is, and whether white space stands before it."""

    kind: str
    text: str
    start: int
    end: int
    spaced: bool


class Tokens(list[Token]):
    """A text's tokens. Beside its ends there are none: `kind`, `text` and `word` are empty there."""

    def __init__(self, text: str) -> None:
        before = 0
        for match in _TOKEN.finditer(text):
            kind = match.lastgroup or "other"
            kind = "digits" if kind == "exponent" else kind
            self.append(Token(kind, match.group(), *match.span(), match.start() > before))
            before = match.end()

    def kind(self, i: int) -> str:
        """Return the kind of a token."""
        return self[i].kind if 0 <= i < len(self) else ""

    def text(self, i: int) -> str:
        """Return a token as it is written."""
        return self[i].text if 0 <= i < len(self) else ""

    def word(self, i: int) -> str:
        """Return a word in lower case; nothing for other tokens."""
        return self[i].text.lower() if self.kind(i) == "word" else ""

    def name(self, i: int) -> str:
        """Return a word of one letter; nothing for other tokens."""
        text = self.text(i)
        return text if len(text) == 1 and self[i].kind == "word" else ""

    def spaced(self, i: int) -> bool:
        """Return whether white space, or the end of the text, stands before a token."""
        return i >= len(self) or self[i].spaced
