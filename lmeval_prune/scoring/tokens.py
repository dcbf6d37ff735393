r"""A text cut into tokens: numbers, words, signs, brackets and stops, each with its kind."""

from __future__ import annotations

import re
from typing import NamedTuple

from lmeval_prune.scoring.numbers import MONEY, VULGAR, Number, number_at
from lmeval_prune.scoring.vocabulary import words

_TOKEN = re.compile(
    rf"""
      (?P<digits>\d+(?:[.,]\d+)*|\.\d+)
    | (?P<vulgar>[{VULGAR}])
    | (?P<money>{MONEY})
    | (?P<word>[A-Za-z]+(?:['’][A-Za-z]+)*)
    | (?P<chinese>[\u4e00-\u9fff]+)
    | (?P<raised>[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)
    | (?P<command>\\[A-Za-z]+)
    | (?P<arrow>[-=]{{1,3}}>|[→⇒])
    | (?P<equals>:=|[=≈≃≅≡])
    | (?P<relation><=|>=|[<>≤≥≠])
    | (?P<minus>[-\u2010\u2011\u2212\u2013\u2014])
    | (?P<operator>\*\*|[+*/⁄^×·⋅∙÷√±∓|∪∩&_])
    | (?P<open>\\?[(\[{{])
    | (?P<close>\\?[)\]}}])
    | (?P<stop>[,;:.!?，、。；：！？\n…])
    | (?P<other>\S)
    """,
    re.VERBOSE,
)
_SIGN_AFTER = frozenset(["equals", "open", "operator", "relation", "stop", "chinese", "money", "arrow", ""])
_BEFORE_SIGNS = frozenset(["equals", "stop", "open", "arrow", "money", ""])
_BEGINNINGS = frozenset(["digits", "vulgar", "money", "open"])
_EQUAL_WORDS = words("equal_words")


class Token(NamedTuple):
    """A piece of a text: its kind, where it is, whether white space stands before it, and the number that it is."""

    kind: str
    text: str
    start: int
    end: int
    spaced: bool
    number: Number | None = None


class Tokens(list[Token]):
    """A text's tokens. Beside its ends there are none: `kind`, `text` and `word` are empty there."""

    def __init__(self, text: str) -> None:
        end = 0
        while match := _TOKEN.search(text, end):
            kind, start = match.lastgroup or "", match.start()
            reading = self._number(text, match)
            number, stop = reading or (None, match.end())
            self.append(Token("number" if number else kind, text[start:stop], start, stop, start > end, number))
            end = stop

    def _number(self, text: str, match: re.Match[str]) -> tuple[Number, int] | None:
        """Return the number that begins with a piece, and its end."""
        kind, piece, before = match.lastgroup, match.group(), self.kind(len(self) - 1)
        if kind == "minus":
            at = match.end()
            spaced = text[at : at + 1].isspace()
            if text[at : at + 1] not in "-+–" and (
                (piece != "—" and before in ("", "equals"))
                or (not spaced and self._is_sign(text, match.start(), piece))
            ):
                reading = number_at(text, at + spaced)
                return reading and (reading[0].negated(), reading[1])
        elif (
            kind in _BEGINNINGS
            or piece.lower() == "negative"
            or (piece.lower() in ("minus", "+") and self._may_begin())
        ):
            reading = number_at(text, match.start())
            if reading and before == "chinese" and self[-1].text.endswith("负"):
                return reading[0].negated(), reading[1]
            return reading
        return None

    def _is_sign(self, text: str, at: int, dash: str) -> bool:
        """Return whether nothing that could be subtracted from stands before a minus."""
        before = self.kind(len(self) - 1)
        if dash != "-":
            return self._may_begin() or before in ("operator", "relation")
        spaced = text[at - 1 : at].isspace()
        with_unit = before == "word" and self.kind(len(self) - 2) == "number" and not self[-1].spaced  # 40cm -22cm
        return before in _SIGN_AFTER or (spaced and before in ("word", "other", "close") and not with_unit)

    def _may_begin(self) -> bool:
        """Return whether a number may begin after the last token, so that plus and minus are signs."""
        last = len(self) - 1
        return self.kind(last) in _BEFORE_SIGNS or self.word(last) in _EQUAL_WORDS

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
        return self[i].text if self.kind(i) == "word" and len(self[i].text) == 1 else ""

    def spaced(self, i: int) -> bool:
        """Return whether white space, or the end of the text, stands before a token."""
        return i >= len(self) or self[i].spaced
