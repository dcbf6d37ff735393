"""What a student learns from its teacher: its answers to training problems or prompts, stored beside the stages.

Each problem gives as many texts as answers to it are kept; a problem without any gives its target, or nothing. Each
prompt of a corpus gives as many as have an end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Interval
from typing_extensions import TypedDict

from lmeval_prune.artefacts import read_artefact, write_artefact
from lmeval_prune.distillation.corpus import Prompt, within
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.planning.own_answers import Answerer, Question, lessons_of

SCHEMA, VERSION = "lmeval-prune/lessons", 1
FILE = "lessons.json"


class Problem(NamedTuple):
    """A training problem as a question to a model, and the token ids of its prompt with the task's target."""

    question: Question
    ids: list[int]
    start: int  # of the target


class Learned(TypedDict):
    """A text of `lessons.json`: token ids of prompt and answer, which begins at `start`."""

    ids: list[Annotated[int, Interval(ge=0, lt=2**31)]]
    start: Annotated[int, Ge(0)]


class LessonsFile(TypedDict):
    """Fields of `lessons.json`, each by part: train, validation; of a corpus: corpus_train, corpus_validation."""

    texts: dict[str, list[Learned]]
    counts: dict[str, dict[str, int]]


def write_lessons(
    folder: Path,
    answerer: Answerer,
    teacher: Any,
    parts: Mapping[str, Sequence[Problem | Prompt]],
    options: DistillOptions,
    positions: int | None = None,
) -> None:
    """Ask the teacher, and write what a student learns on each part; `positions` as in `within`."""
    texts: dict[str, list[Learned]] = {}
    counts: dict[str, dict[str, int]] = {}
    for part, asked in parts.items():
        texts[part], counts[part] = _texts(answerer, teacher, asked, options, positions)
    write_artefact(folder / FILE, SCHEMA, VERSION, {"texts": texts, "counts": counts})


def read_lessons(folder: Path) -> dict[str, Any] | None:
    """Read `lessons.json`; None if it is not there yet, `InputError` if it is damaged."""
    path = folder / FILE
    return read_artefact(path, SCHEMA, VERSION, LessonsFile)[0] if path.is_file() else None


def _texts(
    answerer: Answerer, teacher: Any, asked: Sequence[Problem | Prompt], options: DistillOptions, positions: int | None
) -> tuple[list[Learned], dict[str, int]]:
    """Return the texts of some problems, or of some prompts, in their order, and the numbers of what they are."""
    if not asked:
        return [], {}
    problems = [each for each in asked if isinstance(each, Problem)]
    prompts = [Question(n, {}, each.text) for n, each in enumerate(asked) if isinstance(each, Prompt)]
    if problems:
        questions = [problem.question for problem in problems]
        result = lessons_of(answerer, teacher, questions, options.keep_answers, options.answer_metric)
    else:
        result = lessons_of(answerer, teacher, prompts, "unscored")
    texts: list[list[Learned]] = [[] for _ in asked]
    too_long = 0
    for lesson in result.lessons:
        ids = [*lesson.prompt, *lesson.answer]
        if len(ids) <= within(options.max_length, positions):
            texts[lesson.question].append({"ids": ids, "start": len(lesson.prompt)})
        else:
            too_long += 1
    counts = {**result.counts, "too_long": too_long}
    if problems:
        unsolved = [index for index, several in enumerate(texts) if not several]
        counts["unsolved"] = len(unsolved)
        for index in unsolved if options.unsolved == "target" else ():
            texts[index] = [{"ids": list(problems[index].ids), "start": problems[index].start}]
    return [text for several in texts for text in several], counts
