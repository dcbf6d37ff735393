"""Load ATHENA's training problems and split them into training and validation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from lmeval_prune.athena.equations import Equation
from lmeval_prune.athena.options import TrainOptions
from lmeval_prune.athena.problems import Problem, constants_of, gold_equation
from lmeval_prune.athena.thoughts import labelled_steps
from lmeval_prune.errors import InputError
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
        """Return the number of steps that reach the equation."""
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
        validation_indices = _validation_indices(problems, options)
        train = [problem for index, problem in enumerate(problems) if index not in validation_indices]
        if not train or (options.validation and not validation_indices):
            raise InputError(f"{len(problems)} problems are too few to train and validate; raise limit or validation")
        constants = set().union(*(constants_of(problem.equation.targets) for problem in train))
        validation = [problems[index] for index in sorted(validation_indices)]
        return cls(train, validation, tuple(sorted(constants, key=Fraction)), len(rows) - len(problems), repeated)

    @property
    def digest(self) -> str:
        """Digest of the documents of the training and validation problems."""
        return documents_digest(*([item.document for item in part] for part in (self.train, self.validation)))

    @property
    def questions(self) -> TrainingQuestions:
        """Digests of the training and validation questions."""
        return TrainingQuestions(
            *(question_keys(item.document for item in part) for part in (self.train, self.validation))
        )


def _validation_indices(problems: Sequence[GroundedProblem], options: TrainOptions) -> set[int]:
    """Draw the indices of the validation problems, stratified by complexity."""
    rows = [{"index": index, "part": item.document["complexity"]} for index, item in enumerate(problems)]
    thousandths = round(1000 * options.validation)
    drawn = stratified(rows, "validation", (1000 - thousandths, thousandths, 0), "part", options.seed)
    return {row["index"] for row in drawn}
