"""Outcomes and answers of lm-eval's samples: the rows that `--log_samples` writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from lmeval_prune.artefacts import digest

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
        if len(numbers) == len(pair) <= 2 and numbers and not any(map(math.isnan, numbers)):
            values |= dict(zip((column, WEIGHT + column), numbers, strict=False))
    return values


def _answer(task: str, row: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the question and answer for the page, and a digest of the question's text."""
    doc, arguments = row["doc"], row["arguments"][0]
    likelihood = ""
    field = (config.get("metadata") or {}).get("question_field") or "question"
    text = doc.get(field) if isinstance(doc, dict) else None
    question = text if isinstance(text, str) and text else str(arguments[0])
    if _has_likelihoods(row):
        answers, likelihood = _likeliest(row)
    else:
        answers = [text for responses in row["resps"] for text in responses]
    return {
        "task": task,
        "doc_id": int(row["doc_id"]),
        "question": question,
        "text_key": digest(question),
        "target": str(row["target"]),
        "answer": NEXT_TRY.join(map(str, answers)),
        "likelihood": likelihood,
        "extracted": str(row.get("extracted", "")),
    }


def _has_likelihoods(row: dict[str, Any]) -> bool:
    """Return whether the responses are log-likelihoods: of choices (`arguments[1]`), or of a whole text."""
    arguments = row["arguments"][0]
    return len(arguments) == 1 or isinstance(arguments[1], str)


def _likeliest(row: dict[str, Any]) -> tuple[list[str], str]:
    """Return the choice with the highest log-likelihood, and that log-likelihood as text.

    The list of choices is empty if the task has a single text, so that nothing is chosen.
    """
    scores = log_likelihoods(row)
    best = max(range(len(scores)), key=lambda i: scores[i])
    return [row["arguments"][best][1]] if len(scores) > 1 else [], f"log-likelihood {scores[best]:.2f}"


def log_likelihoods(row: dict[str, Any]) -> list[float]:
    """Return the log-likelihoods of a sample's requests (of several repeats, the first); empty for generated answers.

    lm-eval's files have them as texts.
    """
    if not _has_likelihoods(row):
        return []
    responses = [repeats[0] for repeats in row["resps"]]
    return [float(response[0] if isinstance(response, list | tuple) else response) for response in responses]
