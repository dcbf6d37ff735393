"""Parse word problems for ATHENA into text, numbers and the gold equation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lmeval_prune.athena.equations import Equation, parse
from lmeval_prune.athena.thoughts import Thought
from lmeval_prune.scoring import readings

_ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORDS = {word: number for number, word in enumerate(_ONES + _TEENS)}
_WORDS |= {word: 10 * number for number, word in enumerate(_TENS, start=2)} | {"dozen": 12}
_DIGIT, _TEN, _SMALL = ("|".join(words) for words in (_ONES[1:], _TENS, reversed(_TEENS + _ONES)))
_BELOW_100 = rf"(?:{_TEN})(?:[- ](?:{_DIGIT}))?|{_SMALL}|dozen"
_NUMBER = re.compile(
    rf"""
    (?P<digits> \d{{1,3}}(?:,\d{{3}})+(?:\.\d+)? | \d*\.\d+ | \d+ ) (?P<percent>\s?%)?
    | \b (?P<hundreds>{_DIGIT}) [ ] hundred (?: [ ] (?:and[ ])? (?P<rest>{_BELOW_100}))? \b
    | \b (?P<words>{_BELOW_100}) \b
    """,
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True)
class Problem:
    """A word problem, split into text and numbers.

    Attributes:
        pieces: the text before, between and after the numbers.
        numbers: values of the numbers.
    """

    pieces: tuple[str, ...]
    numbers: tuple[Fraction, ...]

    @classmethod
    def of(cls, text: str) -> Problem:
        """Split an English text at its numbers: digits and number words up to 999."""
        pieces, numbers, end = list[str](), list[Fraction](), 0
        for match in _NUMBER.finditer(text):
            pieces.append(text[end : match.start()])
            numbers.append(_value(match))
            end = match.end()
        return cls((*pieces, text[end:]), tuple(numbers))

    @classmethod
    def of_document(cls, document: Mapping[str, Any], field: str = "question") -> Problem:
        """Parse a document's question, or its `masked_text` and `numbers`; `ValueError` if they do not match."""
        if document.get("masked_text") is None:
            return cls.of(document[field])
        pieces, numbers = document["masked_text"].split("[NUM]"), [readings(text) for text in document["numbers"]]
        if not all(numbers) or len(pieces) != len(numbers) + 1:
            raise ValueError(f"the numbers {document['numbers']} cannot be parsed, or do not match the text")
        return cls(tuple(pieces), tuple(values[-1] for values in numbers))

    def masked(self, mask: str) -> str:
        """Return the lower-cased text with a mask token in place of each number."""
        return mask.join(piece.replace(mask, " ").lower() for piece in self.pieces)


def _value(match: re.Match[str]) -> Fraction:
    if match["digits"]:
        value = Fraction(match["digits"].replace(",", ""))
        return value / 100 if match["percent"] else value
    hundreds = 100 * _WORDS[match["hundreds"].lower()] if match["hundreds"] else 0
    words = re.split(r"[- ]", (match["words"] or match["rest"] or "").lower())
    return Fraction(hundreds + sum(_WORDS[word] for word in words if word))


def gold_equation(document: Mapping[str, Any], problem: Problem) -> Equation:
    """Parse the equation of a document, with the numbers of its problem as leaves.

    Numbers of a `formula` are matched by value; of equal numbers, the first unused is taken. An `equation` names its
    numbers `n0`, `n1`, …, and its constants as in the document's `names`.
    """
    unused = list(range(len(problem.numbers)))
    constants = {name: value for name, value in (document.get("names") or {}).items() if not re.match(r"n\d", name)}

    def leaf(token: Fraction | str) -> Thought:
        if isinstance(token, str):
            if (match := re.fullmatch(r"n(\d+)", token)) and int(match[1]) < len(problem.numbers):
                return ("num", int(match[1]))
            if value := constants.get(token):
                return ("con", value)
        else:
            equal = [index for index, value in enumerate(problem.numbers) if value == token]
            if matches := [index for index in equal if index in unused] or equal:
                if matches[0] in unused:
                    unused.remove(matches[0])
                return ("num", matches[0])
        raise ValueError(f"{token} is not a number of the problem")

    return parse((document.get("formula") or document.get("equation") or "").split("=")[0], leaf)


def constants_of(thoughts: frozenset[Thought]) -> set[str]:
    """Return the constants among the thoughts."""
    return {thought[1] for thought in thoughts if thought[0] == "con"}
