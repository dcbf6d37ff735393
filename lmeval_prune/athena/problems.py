"""ATHENA's word problems: text, numbers and gold equation; those of a training and of its validation."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lmeval_prune.athena.options import TrainOptions
from lmeval_prune.athena.thoughts import Equation, Thought, labelled_steps, parse
from lmeval_prune.errors import InputError
from lmeval_prune.scoring import readings
from lmeval_prune.scoring.equality import expression_is_right
from lmeval_prune.tasks.data import load, stratified
from lmeval_prune.training.questions import (
    Document,
    TrainingQuestions,
    documents_digest,
    drop_test_questions,
    other_folds,
    question_keys,
)

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
    """A word problem, split into text and numbers."""

    pieces: tuple[str, ...]  # the text before, between and after the numbers
    numbers: tuple[Fraction, ...]

    @classmethod
    def of(cls, text: str) -> Problem:
        """Split an English text at its numbers: digits and number words up to 999."""
        pieces, numbers, end = list[str](), list[Fraction](), 0
        for match in _NUMBER.finditer(text):
            pieces.append(text[end : match.start()])
            end = match.end()
            if match["digits"]:
                value = Fraction(match["digits"].replace(",", ""))
                numbers.append(value / 100 if match["percent"] else value)
            else:
                words = re.split(r"[- ]", (match["words"] or match["rest"] or "").lower())
                hundreds = 100 * _WORDS[match["hundreds"].lower()] if match["hundreds"] else 0
                numbers.append(Fraction(hundreds + sum(_WORDS[word] for word in words if word)))
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
        return mask.join(piece.replace(mask, " ").lower() for piece in self.pieces)


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


@dataclass(frozen=True)
class GroundedProblem:
    """A document whose equation uses only constants and numbers of its problem."""

    document: Document
    problem: Problem
    equation: Equation

    @classmethod
    def of(cls, document: Document) -> GroundedProblem | None:
        """Parse a document; return None if its equation needs other numbers."""
        try:
            problem = Problem.of_document(document)
            return cls(document, problem, gold_equation(document, problem))
        except ValueError:
            return None

    def steps(self, constants: Sequence[str]) -> int:
        leaves = [*(("num", i) for i in range(len(self.problem.numbers))), *(("con", value) for value in constants)]
        return len(labelled_steps(leaves, *self.equation))

    def is_solved_by(self, expression: str) -> bool:
        """Return whether an expression solves the problem, as the `_equation` tasks score it."""
        written = self.document.get("formula") or self.document.get("equation") or ""
        return expression_is_right(expression, self.document["target"], written, {})


@dataclass(frozen=True)
class ProblemSplit:
    """Problems for training and validation."""

    train: list[GroundedProblem]
    validation: list[GroundedProblem]
    constants: tuple[str, ...]  # of the training equations
    ungrounded: int  # number of documents dropped because their equation needs a number that is not in the text
    repeated: int  # number of documents dropped because their question is also in the test split

    @classmethod
    def load(cls, options: TrainOptions) -> ProblemSplit:
        """Load the training splits and draw the validation split; `InputError` if too few problems remain."""
        test = load(options.data, options.test, options.data_dir)
        names = options.train or other_folds(options.data, options.test)
        rows = list(load(options.data, "+".join(names), options.data_dir))
        rows, repeated = drop_test_questions(rows, test, options.test)
        if options.limit is not None:
            rows = random.Random(options.seed).sample(rows, min(options.limit, len(rows)))
        problems = [problem for row in rows if (problem := GroundedProblem.of(row))]
        parts = [{"index": index, "part": item.document["complexity"]} for index, item in enumerate(problems)]
        thousandths = round(1000 * options.validation)
        drawn = stratified(parts, "validation", (1000 - thousandths, thousandths, 0), "part", options.seed)
        held_out = {row["index"] for row in drawn}
        train = [problem for index, problem in enumerate(problems) if index not in held_out]
        if not train or (options.validation and not held_out):
            raise InputError(f"{len(problems)} problems are too few to train and validate; raise limit or validation")
        constants = set().union(
            *({thought[1] for thought in problem.equation.targets if thought[0] == "con"} for problem in train)
        )
        validation = [problems[index] for index in sorted(held_out)]
        return cls(train, validation, tuple(sorted(constants, key=Fraction)), len(rows) - len(problems), repeated)

    @property
    def digest(self) -> str:
        return documents_digest(*([item.document for item in part] for part in (self.train, self.validation)))

    @property
    def questions(self) -> TrainingQuestions:
        return TrainingQuestions(
            *(question_keys(item.document for item in part) for part in (self.train, self.validation))
        )
