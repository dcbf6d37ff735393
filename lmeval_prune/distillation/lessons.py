"""What a student learns from its teacher's answers to training problems and prompts; prompts from a file.

A problem gives the answer, if it is right, or else its target. A prompt gives the answer, if it has an end. Prompts
with questions of the test are left out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from lmeval_prune.artefacts import read_lines
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.planning.own_answers import Answerer, Question
from lmeval_prune.pruners.calibration import encode

SOURCE = "prompts"  # of the answers to prompts, which may have the settings of a task
SHARED_WORDS = 13  # consecutive words of a test question that exclude a prompt, or all of a shorter question
LEAST_WORDS = 8  # of a question that prompts are searched for: shorter ones meet by chance (GPT-3, arXiv 2005.14165, C)
_WORD = re.compile(r"\w+")
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")  # Chinese and Japanese: no spaces between words


class Text(NamedTuple):
    """Token ids of a text, of which those from `start` on are learned.

    A training problem has its question, and learns the task's target. A prompt that the teacher answers has a question
    without a document, with its text (in the chat template, if that is used), and nothing to learn yet.
    """

    ids: list[int]
    start: int
    question: Question | None = None

    @property
    def is_problem(self) -> bool:
        """Whether it is a training problem."""
        return self.question is not None and bool(self.question.document)


def learned(
    answerer: Answerer, teacher: Any, texts: Sequence[Text], longest: int, room: float
) -> tuple[list[Text], dict[str, int]]:
    """Ask the teacher problems, or prompts; return what is learned of its answers, and counts.

    Kept is a right answer that has an end, of at most `longest` tokens with its prompt. A problem without one keeps its
    target. A prompt of more tokens than `room` is too long to ask; one that left no room for an answer, of which the
    model therefore read the end alone, is too long, too.
    """
    are_problems = texts[0].is_problem
    asked = [text for text in texts if are_problems or len(text.ids) <= room]
    questions = [text.question for text in asked if text.question]
    if not are_problems:
        questions = [question._replace(number=number) for number, question in enumerate(questions)]
        answerer = replace(answerer, source=SOURCE)
    answers = answerer.answers(teacher, questions)
    rights = answerer.outcomes(questions, answers) if are_problems else [True] * len(answers)
    results = list[Text]()
    counts = {"questions": len(texts), **({"right": sum(rights)} if are_problems else {})}
    counts |= {"cut_off": sum(answer.cut_off for answer in answers), "too_long": len(texts) - len(asked), "kept": 0}
    for text, answer, is_right in zip(asked, answers, rights, strict=True):
        is_whole, ids = is_right and not answer.cut_off, [*answer.prompt, *answer.tokens]
        fits = len(answer.prompt) >= text.start and len(ids) <= longest
        counts["too_long"] += is_whole and not fits
        counts["kept"] += is_whole and fits
        if is_whole and fits:
            results.append(Text(ids, len(answer.prompt)))
        elif are_problems:
            results.append(Text(text.ids, text.start))
    return results, counts | ({"unsolved": len(texts) - counts["kept"]} if are_problems else {})


# ---------------------------------------------------------------------- prompts


class Line(TypedDict):
    """Field of a line that is read."""

    prompt: str


def read_prompts(
    options: DistillOptions,
    tokenizer: Any,
    search: QuestionSearch,
    as_prompt: Callable[[str], str] = str,
    max_length: int = 512,
) -> tuple[list[Text], dict[str, int]]:
    """Read prompts without test questions in an order drawn by the seed; return them, and counts.

    `as_prompt` puts a prompt into the chat template. A text that is learned has at most `max_length` tokens.
    """
    rows = read_lines(str(options.prompts), Line)
    random.Random(options.seed).shuffle(rows)
    prompts = dict[str, Text]()
    counts = {"documents": 0, "with_test_questions": 0, "too_long": 0, "empty": 0, "repeated": 0}
    for row in rows:
        prompt = row["prompt"]
        spaced, rendered = " ".join(prompt.split()), as_prompt(prompt)
        ids = encode(tokenizer, rendered)
        counts["documents"] += 1
        if search.matches(prompt) or search.is_prompt(rendered):
            counts["with_test_questions"] += 1
        elif not spaced:
            counts["empty"] += 1
        elif spaced in prompts:
            counts["repeated"] += 1
        elif len(ids) >= max_length:
            counts["too_long"] += 1
        else:
            prompts[spaced] = Text(ids, len(ids), Question(len(prompts), {}, rendered))
        if len(prompts) == options.limit:
            break
    return list(prompts.values()), {"prompts": len(prompts), **counts}


class QuestionSearch:
    """Test questions, which prompts are searched for.

    Questions without words are skipped. Those of fewer than 8 words, which other texts can have by chance, and
    `prompts` are only compared with whole prompts. Each Chinese or Japanese character counts as a word.
    """

    def __init__(self, questions: Iterable[str], prompts: Iterable[str] = ()) -> None:
        self.runs: dict[int, set[tuple[str, ...]]] = {}
        in_words = {words for question in questions if (words := _words(question))}
        self.prompts = in_words | {words for prompt in prompts if (words := _words(prompt))}
        for words in in_words:
            if sum(max(1, len(_UNSPACED.findall(word))) for word in words) >= LEAST_WORDS:
                length = min(len(words), SHARED_WORDS)
                self.runs.setdefault(length, set()).update(_runs(words, length))

    def is_prompt(self, text: str) -> bool:
        """Return whether a text is a question or prompt of the test, whatever its case and spaces."""
        return _words(text) in self.prompts

    def matches(self, prompt: str) -> bool:
        """Return whether a prompt has 13 consecutive words of a question, or all of a shorter one's.

        Of questions with fewer than 8 words: whether the prompt is one.
        """
        words = _words(prompt)
        return words in self.prompts or any(
            not runs.isdisjoint(_runs(words, length)) for length, runs in self.runs.items()
        )


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.lower()))


def _runs(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + length]) for start in range(len(words) - length + 1))
