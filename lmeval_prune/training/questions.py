"""Training and test questions kept apart: by split, by content, and by what a model was trained on before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError
from lmeval_prune.tasks.data import DATA

Document = Mapping[str, Any]


def question_key(document: Document, field: str = "question") -> str:
    """Return a digest of a document's question, by which it is recognised in another split or run."""
    return digest(document[field])


def question_keys(documents: Iterable[Document]) -> frozenset[str]:
    """Return the digests of the questions of some documents."""
    return frozenset(question_key(document) for document in documents)


def other_folds(data: str, test: str | None) -> list[str]:
    """List the folds of a data set that are not the test.

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
    rows: Iterable[Document], test: Iterable[Document], names: str, test_name: str
) -> tuple[list[Any], int]:
    """Leave out the training rows whose question is in the test, too.

    Returns:
        The other rows, and how many were left out.

    Raises:
        InputError: the rows hold more than half of the test.
    """
    rows, test_keys = list(rows), question_keys(test)
    kept = [row for row in rows if question_key(row) not in test_keys]
    repeated = len(rows) - len(kept)
    if repeated > len(test_keys) // 2:
        raise InputError(
            f"the training splits {names} hold {repeated} of the {len(test_keys)} questions of the test split "
            f"{test_name}; leave them out of train"
        )
    return kept, repeated


@dataclass(frozen=True)
class SeenQuestions:
    """Questions that a model and those it was made from were trained on, as digests.

    Attributes:
        learned: of the training.
        validated: of the validation, which chose an epoch.
    """

    learned: frozenset[str] = frozenset()
    validated: frozenset[str] = frozenset()

    @classmethod
    def from_artefact(cls, content: Mapping[str, Any]) -> SeenQuestions:
        """Read the fields `trained_on` and `validated_on` of an artefact, where it has them."""
        validated = frozenset(content.get("validated_on", ()))
        return cls(frozenset(content.get("trained_on", ())) - validated, validated)

    def to_artefact(self) -> dict[str, list[str]]:
        """Return `trained_on`, all questions, and `validated_on`, those that were never learned."""
        return {
            "trained_on": sorted(self.learned | self.validated),
            "validated_on": sorted(self.validated - self.learned),
        }

    def __or__(self, other: SeenQuestions) -> SeenQuestions:
        return SeenQuestions(self.learned | other.learned, self.validated | other.validated)
