"""What a student learns from its teacher's answers to training problems and prompts, stored beside the stages.

A problem gives the answer, if it is right, or else its target. A prompt gives the answer, if it has an end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from lmeval_prune.artefacts import read_artefact, write_artefact
from lmeval_prune.distillation.prompts import Prompt
from lmeval_prune.planning.own_answers import Answerer, OwnAnswer, Question

SCHEMA, VERSION = "lmeval-prune/lessons", 1
FILE = "lessons.json"
SOURCE = "prompts"  # of the answers to prompts, which may have the settings of a task


class Problem(NamedTuple):
    """A training problem as a question to a model, and the token ids of its prompt with the task's target."""

    question: Question
    ids: list[int]
    start: int  # of the target


class Text(NamedTuple):
    """Token ids of a text; those from `start` on are learned."""

    ids: list[int]
    start: int


class Lessons(TypedDict):
    """Fields of `lessons.json`, each by part: train, validation, train_prompts, validation_prompts."""

    texts: dict[str, list[dict[str, Any]]]
    counts: dict[str, dict[str, int]]


def write_lessons(
    folder: Path,
    answerer: Answerer,
    teacher: Any,
    problems: Mapping[str, Sequence[Problem]],
    prompts: Mapping[str, Sequence[Prompt]],
    longest: int,
    positions: int | None,
) -> None:
    """Ask the teacher, and write what a student learns on each part of problems and of prompts.

    Texts of more than `longest` tokens are left out; `positions` are those of the models, None: any number.
    """
    room = math.inf if positions is None else positions - answerer.length
    learned = {
        part: _of_problems(answerer, teacher, part_problems, longest) for part, part_problems in problems.items()
    }
    learned |= {
        f"{part}_prompts": _of_prompts(answerer, teacher, part_prompts, longest, room)
        for part, part_prompts in prompts.items()
        if part_prompts
    }
    content = {name: {part: pair[n] for part, pair in learned.items()} for n, name in enumerate(("texts", "counts"))}
    write_artefact(folder / FILE, SCHEMA, VERSION, content)


def read_lessons(folder: Path) -> dict[str, Any] | None:
    """Read `lessons.json`; None if it is not there yet, `InputError` if it is damaged."""
    path = folder / FILE
    return read_artefact(path, SCHEMA, VERSION, Lessons)[0] if path.is_file() else None


def _of_problems(
    answerer: Answerer, teacher: Any, problems: Sequence[Problem], longest: int
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return what is learned from problems, in their order, and counts of questions and answers."""
    if not problems:
        return [], {}
    questions = [problem.question for problem in problems]
    answers = answerer.answers(teacher, questions)
    rights = answerer.outcomes(questions, answers)
    learned, counts = _learned(answers, rights, [problem.ids[: problem.start] for problem in problems], longest)
    targets: list[dict[str, Any]] = [{"ids": list(problem.ids), "start": problem.start} for problem in problems]
    texts = [text or target for text, target in zip(learned, targets, strict=True)]
    return texts, {"questions": len(problems), "right": sum(rights), **counts, "unsolved": learned.count(None)}


def _of_prompts(
    answerer: Answerer, teacher: Any, prompts: Sequence[Prompt], longest: int, room: float
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return what is learned from prompts, in their order, and counts of prompts and answers.

    Prompts of more tokens than `room` are too long, and the teacher does not answer them.
    """
    short = [prompt for prompt in prompts if len(prompt.ids) <= room]
    questions = [Question(number, {}, prompt.text) for number, prompt in enumerate(short)]
    answers = replace(answerer, source=SOURCE).answers(teacher, questions)
    learned, counts = _learned(answers, [True] * len(short), [prompt.ids for prompt in short], longest)
    counts["too_long"] += len(prompts) - len(short)
    return list(filter(None, learned)), {"questions": len(prompts), **counts}


def _learned(
    answers: Sequence[OwnAnswer], rights: Sequence[bool], prompts: Sequence[Sequence[int]], longest: int
) -> tuple[list[dict[str, Any] | None], dict[str, int]]:
    """Return the text of each right answer that has an end, `longest` tokens at most and all of its prompt; and counts.

    A prompt that left no room for an answer, of which the model therefore read the end alone, is too long, too.
    """
    texts: list[dict[str, Any] | None] = []
    too_long = 0
    for answer, right, prompt in zip(answers, rights, prompts, strict=True):
        is_whole = right and not answer.cut_off
        fits = len(answer.prompt) >= len(prompt) and len(answer.prompt) + len(answer.tokens) <= longest
        text = {"ids": [*answer.prompt, *answer.tokens], "start": len(answer.prompt)}
        texts.append(text if is_whole and fits else None)
        too_long += is_whole and not fits
    cut_off = sum(answer.cut_off for answer in answers)
    return texts, {"cut_off": cut_off, "too_long": too_long, "kept": len(texts) - texts.count(None)}
