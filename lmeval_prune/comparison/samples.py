"""Outcomes and answers of lm-eval's samples: the rows that `--log_samples` writes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import pandas as pd

from lmeval_prune.artefacts import digest

QUESTION = ["task", "doc_id", "question"]  # columns that identify a question
WEIGHT = "weight of "  # prefix of the column with the weights of a metric whose sample is [log-likelihood, weight]
NEXT_TRY = "\n\n— next try —\n\n"


def tables(
    samples: Mapping[str, list[dict[str, Any]]], configs: Mapping[str, Any]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the outcomes and the answers of lm-eval's samples, a row for each question.

    Args:
        samples: lm-eval's samples by task.
        configs: lm-eval's task configurations by task.
    """
    outcomes: dict[tuple[str, int], dict[str, Any]] = {}
    answers: dict[tuple[str, int], dict[str, Any]] = {}
    for task, rows in sorted(samples.items()):
        for row in rows:
            key = task, int(row["doc_id"])
            record = outcomes.setdefault(key, {"task": task, "doc_id": key[1], "question": row["doc_hash"]})
            record |= _outcome(row)
            if key not in answers:
                answers[key] = _answer(task, row, configs.get(task) or {})
    order = sorted(outcomes)
    return pd.DataFrame([outcomes[key] for key in order]), pd.DataFrame([answers[key] for key in order])


def _outcome(row: dict[str, Any]) -> dict[str, float]:
    """Return the values of a sample's numeric metrics, by `METRIC,FILTER`.

    The value of a perplexity is a pair, a log-likelihood and the number of words or bytes: `WEIGHT` has the second.
    """
    values: dict[str, float] = {}
    for metric in row["metrics"]:
        column, value = f"{metric},{row['filter']}", row.get(metric)
        pair = value if isinstance(value, list | tuple) else [value]
        numbers = [float(item) for item in pair if isinstance(item, bool | int | float | np.number)]
        if len(numbers) == len(pair) <= 2 and numbers and all(map(math.isfinite, numbers)):
            values |= dict(zip((column, WEIGHT + column), numbers, strict=False))
    return values


def _answer(task: str, row: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the question and answer for the page, and a key of the question's text, see `question_keys`."""
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
    return {
        "task": task,
        "doc_id": int(row["doc_id"]),
        "question": question,
        "text_key": key,
        "target": target,
        "answer": NEXT_TRY.join(map(str, answers)),
        "likelihood": likelihood,
        "extracted": str(row.get("extracted", "")),
    }


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


def is_generated(row: dict[str, Any]) -> bool:
    """Return whether a sample has answers, not log-likelihoods."""
    arguments = row["arguments"][0]
    return len(arguments) > 1 and not isinstance(arguments[1], str)


def log_likelihood(response: Any) -> float:
    """Return the number of a response, which lm-eval's files have as a text, alone or as the first of several."""
    return float(str(response[0] if isinstance(response, list | tuple) and response else response))


def log_likelihoods(row: dict[str, Any]) -> list[float]:
    """Return the log-likelihoods of a sample's choices or text (of several repeats, the first); none for answers.

    For `acc_mutual_info`, requests without a context follow those of the choices.
    """
    if is_generated(row):
        return []
    responses = [repeats[0] for repeats in row["resps"]]
    if "acc_mutual_info" in row["metrics"]:
        responses = responses[: len(responses) // 2]
    return list(map(log_likelihood, responses))


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
