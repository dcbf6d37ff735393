"""Prompts that the teacher answers, from a file of JSON lines, without questions of the test."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from lmeval_prune.artefacts import read_lines
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.pruners.calibration import encode

SHARED_WORDS = 13  # consecutive words of a test question that exclude a prompt, or all of a shorter question
LEAST_WORDS = 8  # of a question that prompts are searched for: shorter ones meet by chance (GPT-3, arXiv 2005.14165, C)
_WORD = re.compile(r"\w+")
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")  # Chinese and Japanese: no spaces between words


class Line(TypedDict):
    """Field of a line that is read."""

    prompt: str


class Prompt(NamedTuple):
    """A prompt that the teacher answers, as in the chat template if that is used, and its token ids."""

    text: str
    ids: list[int]


def read_prompts(
    options: DistillOptions,
    tokenizer: Any,
    search: QuestionSearch,
    as_prompt: Callable[[str], str] = str,
    max_length: int = 512,
) -> tuple[list[Prompt], dict[str, int]]:
    """Read prompts without test questions in an order drawn by the seed; return them, and counts for a report.

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
