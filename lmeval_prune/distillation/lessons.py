"""What a student learns from its teacher: its answers to training problems or prompts, stored beside the stages.

Each problem gives as many texts as answers to it are kept; a problem without any gives its target, or nothing. Each
prompt of a corpus gives as many as have an end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

from annotated_types import Ge, Interval
from typing_extensions import TypedDict

from lmeval_prune.artefacts import read_artefact, write_artefact, write_text
from lmeval_prune.distillation.corpus import Prompt, within
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.planning.own_answers import Answerer, Lessons, Question, lessons_of

SCHEMA, VERSION = "lmeval-prune/lessons", 1
FILE = "lessons.json"
CORPUS = "corpus"  # what prompts are of, in messages: their answers may have the settings of a task
CORPUS_PARTS = {"train": "corpus_train", "validation": "corpus_validation"}  # parts of `lessons.json` for prompts


class Problem(NamedTuple):
    """A training problem as a question to a model, and the token ids of its prompt with the task's target."""

    question: Question
    ids: list[int]
    start: int  # of the target


class Learned(TypedDict):
    """A text of `lessons.json`: token ids of prompt and answer, which begins at `start`."""

    ids: list[Annotated[int, Interval(ge=0, lt=2**31)]]
    start: Annotated[int, Ge(0)]
    source: NotRequired[Literal["target"]]  # default: the teacher


class LessonsFile(TypedDict):
    """Fields of `lessons.json`, each by part: train, validation; of a corpus: corpus_train, corpus_validation."""

    texts: dict[str, list[Learned]]
    counts: dict[str, dict[str, int]]


def write_lessons(
    folder: Path,
    answerer: Answerer,
    teacher: Any,
    problems: Mapping[str, Sequence[Problem]],
    prompts: Mapping[str, Sequence[Prompt]],
    options: DistillOptions,
    positions: int | None = None,
) -> None:
    """Ask the teacher, and write what a student learns on each part of problems and of prompts.

    `positions` as in `within`.
    """
    longest = within(options.max_length, positions)
    room = math.inf if positions is None else positions - answerer.sampling.length(answerer.task)
    learned = {part: _of_problems(answerer, teacher, texts, options, longest) for part, texts in problems.items()}
    learned |= {
        CORPUS_PARTS[part]: _of_prompts(answerer, teacher, texts, longest, room)
        for part, texts in prompts.items()
        if texts
    }
    content = {name: {part: pair[n] for part, pair in learned.items()} for n, name in enumerate(("texts", "counts"))}
    write_artefact(folder / FILE, SCHEMA, VERSION, content)


def read_lessons(folder: Path) -> dict[str, Any] | None:
    """Read `lessons.json`; None if it is not there yet, `InputError` if it is damaged."""
    path = folder / FILE
    return read_artefact(path, SCHEMA, VERSION, LessonsFile)[0] if path.is_file() else None


def write_lessons_as_text(path: Path, folder: Path, tokenizer: Any) -> None:
    """Write the lessons of a folder as JSON lines for readers: `part`, `prompt`, `answer` and its `source`.

    Prompts and answers have their special tokens. The source is `teacher`, or `target` (of the data).
    """
    texts = (read_lessons(folder) or {"texts": {}})["texts"]
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    rows = (
        {
            "part": part,
            "prompt": decode(text["ids"][: text["start"]]),
            "answer": decode(text["ids"][text["start"] :]),
            "source": text.get("source", "teacher"),
        }
        for part, part_texts in texts.items()
        for text in part_texts
    )
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _of_problems(
    answerer: Answerer, teacher: Any, problems: Sequence[Problem], options: DistillOptions, longest: int
) -> tuple[list[Learned], dict[str, int]]:
    """Return what is learned from problems, in their order, and counts of questions and answers."""
    if not problems:
        return [], {}
    questions = [problem.question for problem in problems]
    result = lessons_of(answerer, teacher, questions, options.keep_answers, options.answer_metric)
    texts, too_long = _texts_that_fit(result, [problem.ids[: problem.start] for problem in problems], longest)
    unsolved = [index for index, problem_texts in enumerate(texts) if not problem_texts]
    if options.unsolved == "target":
        for index in unsolved:
            texts[index] = [{"ids": list(problems[index].ids), "start": problems[index].start, "source": "target"}]
    counts = {**result.counts, "too_long": too_long, "unsolved": len(unsolved)}
    return [text for problem_texts in texts for text in problem_texts], counts


def _of_prompts(
    answerer: Answerer, teacher: Any, prompts: Sequence[Prompt], longest: int, room: float
) -> tuple[list[Learned], dict[str, int]]:
    """Return what is learned from prompts, in their order, and counts of prompts and answers.

    Prompts of more tokens than `room` are too long, and the teacher does not answer them.
    """
    short = [prompt for prompt in prompts if len(prompt.ids) <= room]
    questions = [Question(number, {}, prompt.text) for number, prompt in enumerate(short)]
    result = lessons_of(replace(answerer, source=CORPUS), teacher, questions, "unscored")
    by_prompt, too_long = _texts_that_fit(result, [prompt.ids for prompt in short], longest)
    texts = [text for prompt_texts in by_prompt for text in prompt_texts]
    counts = {
        "questions": len(prompts),
        "answers": result.counts["answers"],
        "cut_off": result.counts["cut_off"],
        "too_long": too_long + len(prompts) - len(short),
        "kept": len(texts),
        "questions_without": len(prompts) - sum(map(bool, by_prompt)),
    }
    return texts, counts


def _texts_that_fit(result: Lessons, prompts: Sequence[Sequence[int]], longest: int) -> tuple[list[list[Learned]], int]:
    """Return the texts of each prompt that have `longest` tokens at most, and how many texts are too long.

    A prompt that left no room for an answer, of which the model therefore read the end alone, is too long, too.
    """
    texts: list[list[Learned]] = [[] for _ in prompts]
    too_long = 0
    for lesson in result.lessons:
        if len(lesson.prompt) < len(prompts[lesson.question]) or len(lesson.prompt) + len(lesson.answer) > longest:
            too_long += 1
        else:
            texts[lesson.question].append({"ids": [*lesson.prompt, *lesson.answer], "start": len(lesson.prompt)})
    return texts, too_long
