"""Training problems of ATHENA: documents, their split, their steps."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lmeval_prune.artefacts import digest
from lmeval_prune.athena.batches import Encoded, Example
from lmeval_prune.athena.equations import Equation
from lmeval_prune.athena.options import TrainOptions
from lmeval_prune.athena.problems import Problem, constants_of, gold
from lmeval_prune.athena.thoughts import labelled_steps
from lmeval_prune.errors import InputError
from lmeval_prune.scoring.equality import expression_is_right
from lmeval_prune.tasks.data import DATA, load, stratified

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Grounded:
    """A document whose equation is over the numbers of its problem."""

    document: Document
    problem: Problem
    equation: Equation

    @classmethod
    def of(cls, document: Document) -> Grounded | None:
        """Read a document; None if its equation is not over its numbers."""
        try:
            problem = Problem.of_document(document)
            return cls(document, problem, gold(document, problem))
        except ValueError:
            return None

    def example(self, tokenizer: Any, max_length: int, constants: Sequence[str]) -> Example | None:
        """The steps to the equation; None if its numbers were cut off, or it needs another constant."""
        encoded = Encoded.of(self.problem, tokenizer, max_length)
        try:
            steps = labelled_steps(encoded.leaves(constants), *self.equation)
        except ValueError:
            return None
        pairs = [pair for step in steps for pair in zip(*step, strict=True)]
        kept = [candidate.thought for candidate, label in pairs if label]
        return Example(encoded, steps, kept.index(self.equation.root))

    def steps(self, constants: Sequence[str]) -> int:
        """How many steps its equation takes."""
        leaves = [*(("num", i) for i in range(len(self.problem.numbers))), *(("con", value) for value in constants)]
        return len(labelled_steps(leaves, *self.equation))

    def is_solved_by(self, expression: str) -> bool:
        """Whether an expression is right, by the rule of the `_equation` tasks."""
        written = self.document.get("formula") or self.document.get("equation") or ""
        return expression_is_right(expression, self.document["target"], written, {})


@dataclass(frozen=True)
class Material:
    """What a model is trained on.

    Attributes:
        train, validation: problems.
        constants: of the training equations.
        ungrounded: how many documents were left out, for their equation needs a number that the text does not have.
        repeated: how many were left out, for their question is one of the test, too.
    """

    train: list[Grounded]
    validation: list[Grounded]
    constants: tuple[str, ...]
    ungrounded: int
    repeated: int

    @classmethod
    def of(cls, options: TrainOptions) -> Material:
        """Load the training splits, and set the validation split apart.

        Raises:
            InputError: a split does not exist or is the test split under another name, or too little is left.
        """
        test = load(options.data, options.test, options.data_dir)
        names = options.train or other_folds(options.data, options.test)
        rows: list[dict[str, Any]] = [row for name in names for row in load(options.data, name, options.data_dir)]
        own, repeated = without_test(rows, test, ", ".join(names), options.test)
        if options.limit is not None:
            own = random.Random(options.seed).sample(own, min(options.limit, len(own)))
        found = [one for row in own if (one := Grounded.of(row))]
        thousand = round(1000 * options.validation)
        places = [{"place": place, "part": one.document["complexity"]} for place, one in enumerate(found)]
        cut = stratified(places, "validation", (1000 - thousand, thousand, 0), "part", options.seed)
        chosen = {row["place"] for row in cut}
        train = [one for place, one in enumerate(found) if place not in chosen]
        if not train or (options.validation and not chosen):
            raise InputError(f"{len(found)} problems are too few to train and validate; raise limit or validation")
        constants = sorted(set().union(*(constants_of(one.equation.targets) for one in train)), key=Fraction)
        validation = [found[place] for place in sorted(chosen)]
        return cls(train, validation, tuple(constants), len(own) - len(found), repeated)


def other_folds(data: str, test: str) -> list[str]:
    """The folds of a data set that are not the test.

    Raises:
        InputError: the test is no fold.
    """
    folds = [name for name in DATA[data].splits if name.startswith("fold")]
    if test not in folds:
        raise InputError(
            f"test={test} is no fold of {data}; give test, e.g. test=fold0, or name the training splits in train"
        )
    return [name for name in folds if name != test]


def without_test(
    rows: Iterable[Document], test: Iterable[Document], names: str, test_name: str, field: str = "question"
) -> tuple[list[Any], int]:
    """Rows whose question is none of the test's, and how many were left out.

    Raises:
        InputError: the rows hold most of the test.
    """
    known = {question_key(row, field) for row in test}
    every = list(rows)
    own = [row for row in every if question_key(row, field) not in known]
    repeated = len(every) - len(own)
    if repeated > len(known) // 2:
        raise InputError(
            f"the training splits {names} hold {repeated} of the {len(known)} questions of the test split {test_name}; "
            f"leave them out of train"
        )
    return own, repeated


def question_key(document: Document, field: str = "question") -> str:
    """By what a question is known again."""
    return digest(document[field])
