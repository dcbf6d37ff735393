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
from lmeval_prune.planning.own_answers import Answerer, OwnAnswer, Question
from lmeval_prune.pruners.calibration import encode

SOURCE = "prompts"  # of the answers to prompts, which may have the settings of a task
SHARED_WORDS = 13  # consecutive words of a test question that exclude a prompt, or all of a shorter question
LEAST_WORDS = 8  # of a question that prompts are searched for: shorter ones meet by chance (GPT-3, arXiv 2005.14165, C)
_WORD = re.compile(r"\w+")
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")  # Chinese and Japanese: no spaces between words


class Problem(NamedTuple):
    """A training problem as a question to a model, and the token ids of its prompt with the task's target."""

    question: Question
    ids: list[int]
    start: int  # of the target


class Prompt(NamedTuple):
    """A prompt that the teacher answers, as in the chat template if that is used, and its token ids."""

    text: str
    ids: list[int]


class Text(NamedTuple):
    """Token ids of a text; those from `start` on are learned."""

    ids: list[int]
    start: int


Learned = tuple[list[Text], dict[str, int]]  # texts in order, and counts of questions and answers


def of_problems(answerer: Answerer, teacher: Any, problems: Sequence[Problem], longest: int) -> Learned:
    """Ask the teacher problems; return what is learned of each."""
    if not problems:
        return [], {}
    questions = [problem.question for problem in problems]
    answers = answerer.answers(teacher, questions)
    rights = answerer.outcomes(questions, answers)
    learned, counts = _learned(answers, rights, [problem.ids[: problem.start] for problem in problems], longest)
    texts = [text or Text(problem.ids, problem.start) for text, problem in zip(learned, problems, strict=True)]
    return texts, {"questions": len(problems), "right": sum(rights), **counts, "unsolved": learned.count(None)}


def of_prompts(answerer: Answerer, teacher: Any, prompts: Sequence[Prompt], longest: int, room: float) -> Learned:
    """Ask the teacher prompts; return its whole answers. Prompts of more tokens than `room` are too long to ask."""
    short = [prompt for prompt in prompts if len(prompt.ids) <= room]
    questions = [Question(number, {}, prompt.text) for number, prompt in enumerate(short)]
    answers = replace(answerer, source=SOURCE).answers(teacher, questions)
    learned, counts = _learned(answers, [True] * len(short), [prompt.ids for prompt in short], longest)
    counts["too_long"] += len(prompts) - len(short)
    return list(filter(None, learned)), {"questions": len(prompts), **counts}


def _learned(
    answers: Sequence[OwnAnswer], rights: Sequence[bool], prompts: Sequence[Sequence[int]], longest: int
) -> tuple[list[Text | None], dict[str, int]]:
    """Return the text of each right answer that has an end, `longest` tokens at most and all of its prompt; and counts.

    A prompt that left no room for an answer, of which the model therefore read the end alone, is too long, too.
    """
    texts: list[Text | None] = []
    too_long = 0
    for answer, right, prompt in zip(answers, rights, prompts, strict=True):
        is_whole = right and not answer.cut_off
        fits = len(answer.prompt) >= len(prompt) and len(answer.prompt) + len(answer.tokens) <= longest
        texts.append(Text([*answer.prompt, *answer.tokens], len(answer.prompt)) if is_whole and fits else None)
        too_long += is_whole and not fits
    cut_off = sum(answer.cut_off for answer in answers)
    return texts, {"cut_off": cut_off, "too_long": too_long, "kept": len(texts) - texts.count(None)}


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
) -> tuple[list[Prompt], dict[str, int]]:
    """Read prompts without test questions in an order drawn by the seed; return them, and counts.

    `as_prompt` puts a prompt into the chat template. A text that is learned has at most `max_length` tokens.
    """
    rows = read_lines(str(options.prompts), Line)
    random.Random(options.seed).shuffle(rows)
    prompts = dict[str, Prompt]()
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
            prompts[spaced] = Prompt(rendered, ids)
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
