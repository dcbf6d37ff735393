"""What a statement says, by what kind of answer is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lmeval_prune.scoring.expressions import evaluate
from lmeval_prune.scoring.numbers import is_bare_number, number_of, read_number
from lmeval_prune.scoring.plain import plain
from lmeval_prune.scoring.statements import DENIED, MAX_PHRASE, Extraction, extract, sentences

_FORMULA = re.compile(
    r"\$\$([^$]+)\$\$|(?<!\\)\$(?=\S)((?:\\.|[^$\\\n])+?)(?<=\S)\$(?!\d)|\\\(((?:[^\\]|\\[^)])+)\\\)|\\\[((?:[^\\]|\\[^\]])+)\\\]"
    r"|\\begin\{(?:align|equation|gather)\*?\}((?:[^\\]|\\(?!end\{(?:align|equation|gather))[\s\S])+)\\end\{"
)
_BULLET = re.compile(r"^\s*(?:[-*•–—>]|\d{1,2}[.)])\s+")


def _flat(text: str) -> str:
    return " ".join(text.split())


@dataclass(frozen=True)
class NumberReader:
    """Reads one number.

    Attributes:
        strict: a letter at the digits is a variable, never a unit.
    """

    strict: bool = False

    def read(self, content: str, how: str) -> str | None:
        """The number; of what is no number alone, the whole text; None where nothing is said of a number."""
        text = plain(content[:MAX_PHRASE]).strip()
        text = _flat(text) if how == "boxed" else text
        if found := read_number(text):
            return found[0]
        return text if text and (how == "boxed" or re.search(r"\d", text)) else None

    def is_bare(self, content: str) -> bool:
        """Whether it is a number with its unit."""
        return is_bare_number(plain(content).strip(" .!。"))

    def read_end(self, text: str) -> str | None:
        """The number of the last sentence that has one, unless doubts follow it."""
        for sentence in reversed(sentences(text)):
            if DENIED.search(sentence):
                return None
            if re.search(r"\d", sentence):
                found = read_number(_BULLET.sub("", plain(sentence)), last=True)
                return found[0] if found else None
        return None


def number(response: str) -> Extraction:
    """The final answer that is one number."""
    return extract(response, NumberReader())
