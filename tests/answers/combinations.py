r"""Answers by combination: what stands before, how the answer is carried, its value, and what follows it.

A combination holds what is to be accepted and what is not: the value, and its neighbours; where an ending takes the
value back for another, the other, and not the value. `carriers.jsonl` and `endings.jsonl` are in prose of a language; in them
`{v}` is the value in prose, `{m}` in LaTeX, `{j}` in JSON, `{w}` the other value, `{a}`, `{b}`, `{s}` and `{p}` two small
numbers, their sum and their product.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import strategies as st

from tests.answers import Case, load
from tests.answers.values import MATHEMATICS, VALUES, Value


@dataclass(frozen=True)
class Carrier:
    """A way to state an answer, for the values of some families; `joint` stands before what follows."""

    family: str
    template: str
    joint: str = " "
    language: str = "en"
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ending:
    """What follows an answer; `replaces` if it takes the value back for another."""

    family: str
    template: str
    language: str = "en"
    replaces: bool = False


@dataclass(frozen=True)
class Combination:
    """A text with the gold answers that it states and those that it does not."""

    carrier: Carrier
    ending: Ending
    value: str
    kind: str
    text: str
    stated: str
    unstated: tuple[str, ...]

    @property
    def families(self) -> tuple[str, str, str]:
        return self.carrier.family, self.value, self.ending.family

    def cases(self, number: int = 0) -> list[Case]:
        """Make its cases for the scorers, of a number: the first with the gold answer that is stated."""
        row = {"level": 1, "subject": "Algebra"} if self.kind == MATHEMATICS else {}
        families = " × ".join(self.families)
        golds = [(self.stated, True), *((target, False) for target in self.unstated)]
        return [
            Case("combinations", number, self.kind, families, "", self.text, {"target": target} | row, expected, "")
            for target, expected in golds
        ]


# --------------------------------------------------------------------------- carriers and endings


def _listed(kind: type, name: str) -> list[Any]:
    """Read the entries of a file: fields of a class."""
    return [kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in load(name)]


PARAGRAPH = "\n\n"
CARRIERS: list[Carrier] = _listed(Carrier, "carriers")
ENDINGS: list[Ending] = _listed(Ending, "endings")
PREFACES = {
    "en": [
        "",
        "Let me think step by step. First, {a} × {b} = {p}.\n\n",
        "Step 1: There are {a} boxes.\nStep 2: Each holds {b}.\n\n",
        "<think>\nIs it {p}? No, {a} of them are missing.\n</think>\n\n",
        "We are asked for what is left after {a} days.\n\n",
    ],
    "zh": ["", "先算{a}×{b}={p}。\n\n", "每排有{a}个座位，共{b}排。"],
}


def combine(carrier: Carrier, family: str, ending: Ending, preface: str, random: Random) -> Combination:
    """Fill a carrier and an ending with values of a family, drawn at random."""
    value, other = VALUES[family](random), VALUES[family](random)
    while other.target == value.target or other.target in value.neighbours or value.target in other.neighbours:
        other = VALUES[family](random)
    numbers = [random.randint(3, 12), random.randint(3, 12)]
    places = dict(zip("absp", map(str, [*numbers, sum(numbers), numbers[0] * numbers[1]]), strict=True))
    places |= {
        "v": _prose(value, carrier.language, random),
        "w": _prose(other, carrier.language, random),
        "m": value.latex,
        "j": json.dumps(random.choice([value.plain, value.latex]), ensure_ascii=False),
    }
    joint = random.choice([carrier.joint, PARAGRAPH]) if ending.template else ""
    text = preface + carrier.template + joint + ending.template
    for placeholder, written in places.items():
        text = text.replace(f"{{{placeholder}}}", written)
    stated, unstated = (other, (value.target,)) if ending.replaces else (value, value.neighbours)
    return Combination(carrier, ending, family, value.kind, text, stated.target, unstated)


def parts(carrier: Carrier) -> tuple[list[str], list[Ending], list[str]]:
    """List what goes with a carrier: families of values, endings, prefaces."""
    endings = [ending for ending in ENDINGS if ending.language == carrier.language]
    return list(carrier.values or VALUES), endings, PREFACES[carrier.language]


def drawn(random: Random) -> Combination:
    """Draw a combination."""
    carrier = random.choice(CARRIERS)
    family, ending, preface = (random.choice(part) for part in parts(carrier))
    return combine(carrier, family, ending, preface, random)


@st.composite
def combinations(draw: st.DrawFn) -> Combination:
    """Draw a combination for a test; of those that fail, the one with the first parts of the lists is shown."""
    carrier = draw(st.sampled_from(CARRIERS))
    family, ending, preface = (draw(st.sampled_from(part)) for part in parts(carrier))
    return combine(carrier, family, ending, preface, Random(draw(st.integers(0, 2**32))))


def _prose(value: Value, language: str, random: Random) -> str:
    """Write a value within prose: as it is, or as a formula."""
    plain = value.chinese if language == "zh" else value.plain
    return random.choice([plain, f"${value.latex}$", rf"\({value.latex}\)"])


# --------------------------------------------------------------------------- classes that are misread


@dataclass(frozen=True)
class Misread:
    """A class of combinations that are misread: of any of some families, or all of a kind where none is named.

    Attributes:
        example: a text of the class, its kind, the gold answer, and the verdict that a fair reader gives and we do not.
        written: a regular expression that the texts match.
    """

    name: str
    example: tuple[str, str, str, bool]
    carriers: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()
    written: str = ""

    def holds(self, combination: Combination) -> bool:
        """Return whether a combination is of the class."""
        groups = zip((self.carriers, self.values, self.endings), combination.families, strict=True)
        named = all(not group or family in group for group, family in groups)
        return named and bool(re.search(self.written, combination.text))

    def case(self) -> Case:
        """Make a case of its example."""
        text, kind, target, expected = self.example
        row = {"target": target} | ({"level": 1, "subject": "Algebra"} if kind == MATHEMATICS else {})
        return Case("combinations", 0, kind, self.name, "", text, row, expected, self.name)


# Classes that are known to be misread; one that is read now has to go.
MISREAD: list[Misread] = _listed(Misread, "misread")
