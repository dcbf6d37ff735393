r"""Answers by combination: what stands before, how the answer is carried, its value, and what follows it.

A combination holds what is to be accepted and what is not: the value, and its neighbours; where an ending takes the
value back for another, the other, and not the value. `CARRIERS` and `ENDINGS` are in prose of a language; in them
`{v}` is the value in prose, `{m}` in LaTeX, `{j}` in JSON, `{w}` the other value, `{a}`, `{b}`, `{s}` and `{p}` two small
numbers, their sum and their product.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st

from tests.answers import Case
from tests.answers.values import AMOUNTS, MATHEMATICS, VALUES, Value


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

LINE, PARAGRAPH = "\n", "\n\n"
CARRIERS = [
    Carrier("phrase", "The answer is {v}."),
    Carrier("phrase", "Therefore, the answer is {v}."),
    Carrier("phrase", "So the final answer is: {v}."),
    Carrier("phrase", "The correct answer is thus {v}", PARAGRAPH),
    Carrier("label", "Answer: {v}", LINE),
    Carrier("label", "**Answer:** {v}", LINE),
    Carrier("label", "Final Answer: {v}", LINE),
    Carrier("label", "**Final answer: {v}**", PARAGRAPH),
    Carrier("heading", "### Final Answer\n{v}", PARAGRAPH),
    Carrier("heading over bold", "## Answer\n\n**{v}**", PARAGRAPH),
    Carrier("box", r"$\boxed{{m}}$", LINE),
    Carrier("box", r"So the answer is $\boxed{{m}}$."),
    Carrier("box", "\\[\n\\boxed{{m}}\n\\]", PARAGRAPH),
    Carrier("box", r"Hence we get \(\boxed{{m}}\)."),
    Carrier("hashes", "#### {v}", LINE),
    Carrier("tag", "<answer>{v}</answer>", LINE),
    Carrier("tag", "<answer>\n{v}\n</answer>", LINE),
    Carrier("JSON", '{"answer": {j}}', LINE),
    Carrier("JSON", '```json\n{"reasoning": "as above", "answer": {j}}\n```', LINE),
    Carrier("bold", "**{v}**", PARAGRAPH),
    Carrier("bold in a sentence", "So the result is **{v}**."),
    Carrier("last sentence", "So {v} it is."),
    Carrier("last sentence", "That makes {v}.", values=AMOUNTS),
    Carrier("last sentence", "Thus we get {v}."),
    Carrier("last sentence", "In total, that gives {v}.", values=AMOUNTS),
    Carrier("last sentence", "The result is {v}."),
    Carrier("equation", "Total = {v}", LINE, values=AMOUNTS),
    Carrier("equation", "= {v}", LINE),
    Carrier("equation", r"$$A = {m}$$", LINE),
    Carrier(
        "equation",
        "x = {v}",
        LINE,
        values=("integer", "negative", "decimal", "fraction", "MATH: surd", "MATH: fraction"),
    ),
    Carrier("table", "| step | value |\n| --- | --- |\n| Answer | {v} |", PARAGRAPH),
    Carrier(
        "table with a total",
        "| item | amount |\n|---|---|\n| first | {a} |\n| second | {b} |\n| **Total** | **{v}** |",
        PARAGRAPH,
        values=AMOUNTS,
    ),
    Carrier("list", "- First part: done\n- Answer: {v}", PARAGRAPH),
    Carrier("list", "1. We read the question.\n2. We find that the answer is {v}.", PARAGRAPH),
    Carrier("Chinese phrase", "答案是{v}。", "", "zh"),
    Carrier("Chinese phrase", "所以最终答案为{v}。", "", "zh"),
    Carrier("Chinese label", "答案：{v}", LINE, "zh"),
    Carrier("Chinese label", "答：{v}。", LINE, "zh"),
    Carrier("Chinese box", r"因此答案是$\boxed{{m}}$。", "", "zh"),
    Carrier("Chinese last sentence", "所以结果是{v}。", "", "zh"),
    Carrier("Chinese last sentence", "因此一共是{v}。", "", "zh", AMOUNTS),
]
CARRIERS += [
    Carrier("phrase", "We conclude that the answer is {v}."),
    Carrier("phrase", "The answer to the question is {v}."),
    Carrier("phrase", "So, the answer's {v}."),
    Carrier("result", "Result: {v}", LINE),
    Carrier("label", "ANSWER: {v}", LINE),
    Carrier("label", "Answer = {v}", LINE),
    Carrier("label", "> **Answer:** {v}", PARAGRAPH),
    Carrier("label", "(Answer: {v})", LINE),
    Carrier("box", r"Thus $\boxed{{m}}$ is the answer."),
    Carrier("bold", "✅ **{v}**", PARAGRAPH),
    Carrier("arrow", "→ {v}", LINE),
    Carrier("last sentence", "It equals {v}."),
    Carrier("Chinese label", "【答案】{v}", LINE, "zh"),
    Carrier("Chinese phrase", "综上，答案是**{v}**。", "", "zh"),
    Carrier("Chinese box", r"最终答案：$\boxed{{m}}$", LINE, "zh"),
]
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
ENDINGS = [
    Ending("nothing", ""),
    Ending("check", "Check: {a} + {b} = {s}. ✓"),
    Ending("check", "Let me double-check: {a} × {b} = {p}, as it should be."),
    Ending("check", "We can verify this: {a} + {b} = {s}, which fits."),
    Ending("offer", "Let me know if you need help with anything else!"),
    Ending("offer", "Would you like to see another example with {a} boxes?"),
    Ending("offer", "I hope this helps! Feel free to ask {a} or {b} more questions."),
    Ending("footnote", "Note: a month is taken to have 30 days."),
    Ending("footnote as a line", "\n\n* Assuming that there are 52 weeks in a year."),
    Ending("explanation", "Explanation: each of the {a} rows has {b} seats."),
    Ending("explanation", "This is because there are {a} rows with {b} seats each."),
    Ending("explanation", "Here we used that {a} + {b} = {s}."),
    Ending("confirmation", "That is my final answer."),
    Ending("confirmation", "I have checked it twice, and it is correct."),
    Ending(
        "next question",
        "\n\nQuestion: A train has {a} cars with {b} seats each. How many seats are there?\nAnswer: {p}",
    ),
    Ending("next question", "\n\nQ: Tom has {a} pens and buys {b} more. How many has he now?\nA: {s}"),
    Ending("remark", "This took {a} steps."),
    Ending("remark", "Remember that an hour has 60 minutes."),
    Ending("remark", "P.S. The first step alone has {a} cases."),
    Ending("remark", "(The {a} in the first step is the number of boxes.)"),
    Ending("farewell", "Have a nice day! 😊"),
    Ending("nothing", "", "zh"),
    Ending("check", "验算：{a}×{b}={p}，正确。", "zh"),
    Ending("offer", "希望对你有帮助！如果还有其他问题，请告诉我。", "zh"),
    Ending("explanation", "因为每排有{a}个座位，共{b}排。", "zh"),
    Ending("retraction", "Wait, that's wrong. The answer is {w}.", replaces=True),
    Ending("retraction", "Correction: the answer is {w}.", replaces=True),
    Ending("retraction: it should be", "Sorry, I made a mistake: it should be {w}.", replaces=True),
    Ending("retraction", "Hmm, I forgot one case. So the answer is {w}.", replaces=True),
    Ending("retraction: scratch that", "Scratch that: {w}.", replaces=True),
    Ending("retraction", "Actually, no. It is {w}.", replaces=True),
    Ending("retraction", "On second thought, the correct answer is {w}.", replaces=True),
    Ending("retraction", "No wait, I misread the question. The answer should be {w}.", replaces=True),
    Ending("retraction", "EDIT: the answer is {w}.", replaces=True),
    Ending("retraction", "My mistake. The right answer is {w}.", replaces=True),
    Ending("retraction", "That can't be right. Redoing it gives {w}.", replaces=True),
    Ending("retraction", "Oops! I meant {w}.", replaces=True),
    Ending("retraction", "Let me correct that: the answer is {w}, not {v}.", replaces=True),
    Ending("retraction", "更正：答案是{w}。", "zh", True),
    Ending("retraction", "等等，不对，应该是{w}。", "zh", True),
    Ending("retraction", "抱歉，我算错了，正确答案是{w}。", "zh", True),
]


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
MISREAD = [
    Misread(
        "a remark with a number after an answer without a mark",
        ("Total = 21.4\n\nThis took 7 steps.", "number", "21.4", True),
        carriers=(
            "last sentence",
            "equation",
            "bold",
            "bold in a sentence",
            "heading over bold",
            "table with a total",
            "arrow",
            "result",
        ),
        endings=("remark",),
    ),
    Misread(
        "the answer's, which is no mark",
        ("So, the answer's 7. This took 12 steps.", "number", "7", True),
        carriers=("phrase",),
        written="the answer's",
    ),
    Misread(
        "a label and its formula in brackets",
        ("(Answer: 6^28)\n\nThat is my final answer.", MATHEMATICS, "6^{28}", True),
        written=r"\(Answer: ",
    ),
    Misread(
        "one formula, not another",
        (
            r"The answer is $\{1, 2\}$. Let me correct that: the answer is {-6, 22}, not $\{1, 2\}$.",
            MATHEMATICS,
            r"\{-6, 22\}",
            True,
        ),
        values=tuple(family for family in VALUES if family.startswith("MATH")),
        written="Let me correct that",
    ),
    Misread(
        "'I meant' before a sign",
        (r"Answer: $\{1, 2\}$" + "\n\n" + r"Oops! I meant $\{-4, 3\}$.", MATHEMATICS, r"\{-4, 3\}", True),
        written="I meant",
    ),
    Misread(
        "an arrow before a formula",
        ("→ 2^37", MATHEMATICS, "2^{37}", True),
        carriers=("arrow",),
        values=tuple(family for family in VALUES if family.startswith("MATH")),
        written=r"→ [^$\\]*$",
    ),
    Misread(
        "a pair without dollar signs before an explanation",
        ("Thus we get (7, 0).\n\nExplanation: each of the 9 rows has 8 seats.", MATHEMATICS, "(7, 0)", True),
        carriers=("last sentence",),
        values=("MATH: pair",),
        endings=("explanation",),
    ),
    Misread(
        "the answer to the next question, where the first is of another form",
        (
            "So (10, -9) it is.\n\nQ: Tom has 5 pens and buys 5 more. How many has he now?\nA: 10",
            MATHEMATICS,
            "10",
            False,
        ),
        carriers=("last sentence", "equation", "bold", "bold in a sentence", "phrase"),
        endings=("next question",),
    ),
]
