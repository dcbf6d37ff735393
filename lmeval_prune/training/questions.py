"""Keep training and test questions apart: by split, by text, and by earlier trainings of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lmeval_prune.artefacts import digest, without_addresses
from lmeval_prune.errors import InputError

T = TypeVar("T")
Document = Mapping[str, Any]
SHARED_WORDS = 13  # consecutive words of a test question that exclude a prompt, or all of a shorter question
LEAST_WORDS = 8  # of a question that prompts are searched for: shorter ones meet by chance (GPT-3, arXiv 2005.14165, C)
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"  # of Chinese and Japanese: each is a word
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+")


def question_key(document: Document, field: str = "question") -> str:
    return digest(document[field])


def question_keys(documents: Iterable[Document]) -> frozenset[str]:
    return frozenset(question_key(document) for document in documents)


def documents_digest(*parts: Sequence[Document]) -> str:
    """Return a digest of parts of documents; values without a JSON form count by their text."""
    return digest(json.dumps(parts, default=lambda value: without_addresses(str(value))))


def other_folds(data: str, test: str | None) -> list[str]:
    from lmeval_prune.tasks.data import DATA
    from lmeval_prune.tasks.splits import split_names

    return [name for name in DATA[data].splits if name.startswith("fold") and name not in split_names(test or "")]


def drop_test_questions(rows: Iterable[Document], test: Iterable[Document], test_name: str) -> tuple[list[Any], int]:
    """Drop the training rows whose question is also in the test; return the other rows and the number of dropped rows.

    Questions that differ in spaces or in upper and lower case alone are the same.
    """
    rows, test_questions = list(rows), {normalised_question(row["question"]) for row in test}
    unrepeated = [row for row in rows if normalised_question(row["question"]) not in test_questions]
    repeated = len(rows) - len(unrepeated)
    if repeated > len(test_questions) // 2:
        raise InputError(f"the training splits have {repeated} questions of the test split {test_name}")
    return unrepeated, repeated


def normalised_question(question: object) -> str:
    return " ".join(str(question).lower().split())


class QuestionSearch:
    """Finds test questions in prompts, and prompts that are those of the test, whatever their case and spaces.

    Questions of fewer than 8 words, which other texts can have by chance, and `prompts` are only compared with whole
    prompts.
    """

    def __init__(self, questions: Iterable[str], prompts: Iterable[str] = ()) -> None:
        of_questions = {_words(question) for question in questions}
        self.whole = (of_questions | {_words(prompt) for prompt in prompts}) - {()}
        self.runs: dict[int, set[tuple[str, ...]]] = {}  # by their length
        for words in of_questions:
            if len(words) >= LEAST_WORDS:
                length = min(len(words), SHARED_WORDS)
                self.runs.setdefault(length, set()).update(_runs(words, length))

    def is_in(self, prompt: str) -> bool:
        """Return whether a prompt is the test's, has 13 consecutive words of a question, or all of a shorter one's."""
        words = _words(prompt)
        return words in self.whole or any(not runs.isdisjoint(_runs(words, n)) for n, runs in self.runs.items())


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.lower()))


def _runs(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + length]) for start in range(len(words) - length + 1))


def split_by_question(problems: Sequence[T], questions: Iterable[Hashable], count: int) -> tuple[list[T], list[T]]:
    """Split problems into at most the first `count` and the others, with all problems of a question on one side.

    If each question has more than `count` problems, those of the question with the fewest are split off.
    """
    groups: dict[Hashable, list[T]] = {}
    for problem, question in zip(problems, questions, strict=True):
        groups.setdefault(question, []).append(problem)
    first, others = list[T](), list[T]()
    for group in groups.values():
        (first if len(first) + len(group) <= count else others).extend(group)
    if count and groups and not first:
        smallest = min(groups.values(), key=len)
        return smallest, [problem for group in groups.values() if group is not smallest for problem in group]
    return first, others


@dataclass(frozen=True)
class TrainingQuestions:
    """Digests of the questions that a model and its ancestors were trained on."""

    trained: frozenset[str] = frozenset()  # training questions
    validated: frozenset[str] = frozenset()  # validation questions, which chose the best epoch

    @classmethod
    def from_artefact(cls, content: Mapping[str, Any]) -> TrainingQuestions:
        """Read the optional fields `trained_on` and `validated_on` of an artefact."""
        validated = frozenset(content.get("validated_on", ()))
        return cls(frozenset(content.get("trained_on", ())) - validated, validated)

    def to_artefact(self) -> dict[str, list[str]]:
        """Return `trained_on`, all questions, and `validated_on`, the questions without training."""
        return {
            "trained_on": sorted(self.trained | self.validated),
            "validated_on": sorted(self.validated - self.trained),
        }

    def __or__(self, other: TrainingQuestions) -> TrainingQuestions:
        return TrainingQuestions(self.trained | other.trained, self.validated | other.validated)
