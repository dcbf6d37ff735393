"""What a sample says: a row that `lm_eval --log_samples` wrote, with `arguments` as a list of lists."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from lmeval_prune.artefacts import digest

WEIGHT = "weight of "  # prefix of the column with the weights of a metric whose sample is [log-likelihood, weight]
NEXT_TRY = "\n\n— next try —\n\n"
MAX_TEXT = 1640  # characters; the middle of a longer text is left out


class Answer(NamedTuple):
    """A question and an answer to it, as the page shows them."""

    question: str
    target: str
    answer: str
    likelihood: str  # of the likeliest choice or of the text; empty for generated answers


def values(row: dict[str, Any]) -> dict[str, float]:
    """Return the values of a sample's numeric metrics, by `METRIC,FILTER`.

    The value of a perplexity is a pair, a log-likelihood and the number of words or bytes: `WEIGHT` has the second.
    """
    result: dict[str, float] = {}
    for metric in row["metrics"]:
        column, value = f"{metric},{row['filter']}", row.get(metric)
        pair = value if isinstance(value, list | tuple) else [value]
        numbers = [float(item) for item in pair if isinstance(item, bool | int | float | np.number)]
        if len(numbers) == len(pair) <= 2 and numbers and all(map(math.isfinite, numbers)):
            result |= dict(zip((column, WEIGHT + column), numbers, strict=False))
    return result


def read_answer(row: dict[str, Any], config: dict[str, Any]) -> tuple[Answer, str]:
    """Return what the page shows of a sample, and a key of the question's text, see `question_keys`."""
    doc, arguments = row["doc"], row["arguments"][0]
    field = (config.get("metadata") or {}).get("question_field") or "question"
    text = doc.get(field) if isinstance(doc, dict) else None
    question = text if isinstance(text, str) and text else str(arguments[0])
    answers, likelihood, key = [text for responses in row["resps"] for text in responses], "", digest(question)
    target = str(row["target"])
    if scores := log_likelihoods(row):
        best = max(range(len(scores)), key=lambda i: scores[i])
        choices, likelihood = _choices(row), f"log-likelihood {scores[best]:.2f}"
        answers, key = choices[best : best + 1], f"{key}/{digest(choices)}" if choices else key
        if target.isdecimal() and int(target) < len(choices):  # lm-eval's number of the choice
            target = choices[int(target)].strip()
    return Answer(question, target, NEXT_TRY.join(map(str, answers)), likelihood), key


def shortened(text: str) -> str:
    """Return a text; of a text longer than `MAX_TEXT`, leave out the middle."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2 - 20
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"


def question_keys(text_keys: Sequence[str]) -> list[str]:
    """Return what identifies a question in several tasks: its text, and its choices where they tell it from others.

    Many questions are "Which of the following is true?"; and one question may be asked with choices and without.

    Args:
        text_keys: digests of the text, `TEXT/CHOICES` if there are choices.
    """
    choices: defaultdict[str, set[str]] = defaultdict(set)
    for key in text_keys:
        text, has_choices, choices_key = key.partition("/")
        choices[text] |= {choices_key} if has_choices else set()
    return [key if len(choices[text]) > 1 else text for key in text_keys for text in [key.partition("/")[0]]]


def log_likelihoods(row: dict[str, Any]) -> tuple[float, ...]:
    """Return the log-likelihoods of a sample's choices or text (of several repeats, the first); none for answers.

    For `acc_mutual_info`, requests without a context follow those of the choices.
    """
    arguments = row["arguments"][0]
    if len(arguments) > 1 and not isinstance(arguments[1], str):  # settings of a generated answer
        return ()
    responses = [repeats[0] for repeats in row["resps"]]
    if "acc_mutual_info" in row["metrics"]:
        responses = responses[: len(responses) // 2]
    # lm-eval's files have the number as a text, alone or as the first of several
    return tuple(float(str(value[0] if isinstance(value, list | tuple) and value else value)) for value in responses)


def _choices(row: dict[str, Any]) -> list[str]:
    """Return a sample's choices: continuations, or if these are the same, what differs before them; none of a text."""
    arguments = row["arguments"][: len(log_likelihoods(row))]
    if len(arguments) < 2:
        return []
    contexts, continuations = zip(*(map(str, request[:2]) for request in arguments), strict=True)
    if len(set(contexts)) == 1:
        return list(continuations)
    words = [re.findall(r"\s*\S+", context) for context in contexts]
    same = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*words, strict=False)))
    return ["".join(pieces[same:]).lstrip() + text for pieces, text in zip(words, continuations, strict=True)]
