"""What a sample of `lm_eval --log_samples` says, and how lm-eval computes a task's metrics from its samples."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError

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


# ---------------------------------------------------------------------- metrics

PREFERRED_METRICS = ("exact_match", "acc")  # best first; the default for the compared metric


class Aggregation(NamedTuple):
    """How a metric is computed from its samples: by the (weighted) mean of `factor` times their values."""

    factor: float = 1.0
    is_exponential: bool = False  # the metric is the exponential of that mean
    is_weighted: bool = False


# lm-eval's aggregations that are a function of a mean over documents; a perplexity's samples are log-likelihoods
AGGREGATIONS = {
    "mean": Aggregation(),
    "perplexity": Aggregation(-1.0, is_exponential=True),
    "weighted_perplexity": Aggregation(-1.0, is_exponential=True, is_weighted=True),
    "bits_per_byte": Aggregation(-1 / math.log(2), is_weighted=True),
}
# lm-eval's defaults for its metrics
DEFAULT_AGGREGATIONS = {
    **dict.fromkeys(("acc", "acc_bytes", "acc_mutual_info", "acc_norm", "exact_match", "likelihood"), "mean"),
    **{name: name for name in ("bleu", "brier_score", "bypass", "chrf", "chrf++", "f1", "ter")},
    "mcc": "matthews_corrcoef",
    "perplexity": "perplexity",
    "word_perplexity": "weighted_perplexity",
    "byte_perplexity": "weighted_perplexity",
    "bits_per_byte": "bits_per_byte",
}


class Metric(NamedTuple):
    """A metric of a task."""

    column: str  # `METRIC,FILTER`
    aggregation: Aggregation = Aggregation()
    lower_is_better: bool = False


Values = Mapping[str, np.ndarray]  # of questions, by `METRIC,FILTER` and `WEIGHT`; NaN: no value


def known_metrics(values: Values, results: Mapping[str, Any], task: str, source: Path) -> dict[str, Metric]:
    """Return the metrics of a task that are a function of a mean over the questions that have a value, by column.

    Others (F1, BLEU) are left out: lm-eval's configuration of the task names another aggregation, or none gives the
    figure in lm-eval's `results`. `source` is the file with the samples.
    """
    entries: list[dict[str, Any]] = (results.get("configs") or {}).get(task, {}).get("metric_list") or []
    declared = {entry["metric"]: entry.get("aggregation") for entry in entries}
    figures: Mapping[str, Any] = results["results"].get(task, {})
    higher = (results.get("higher_is_better") or {}).get(task) or {}
    metrics: dict[str, Metric] = {}
    for column in columns_of(values):
        name, has_value = metric_name(column), ~np.isnan(values[column])
        own = values[column][has_value]
        weights = values[WEIGHT + column][has_value] if WEIGHT + column in values else None
        if not len(own) or name == "bypass":  # of `--predict_only`
            continue
        expected = declared.get(name) or DEFAULT_AGGREGATIONS.get(name)
        figure = figures.get(column)
        if isinstance(figure, float) and math.isnan(figure):  # a question has no value
            figure = None
        names = [expected or "mean"] if figure is None else [expected, *AGGREGATIONS]
        if weights is not None and not ((weights >= 0).all() and weights.any()):  # pairs of something else
            names = []
        plain_mean = float(own.mean() if weights is None else own.sum() / weights.sum()) if names else math.nan
        fitting = []
        for aggregation in (AGGREGATIONS[name] for name in names if name in AGGREGATIONS):
            with np.errstate(over="ignore"):
                mean = aggregation.factor * plain_mean
                mean = float(np.exp(mean)) if aggregation.is_exponential else mean
            is_same = figure is None or math.isclose(mean, figure, rel_tol=1e-5, abs_tol=1e-9)
            if aggregation.is_weighted == (weights is not None) and is_same:
                fitting.append(aggregation)
        if fitting:
            is_lower = fitting[0].factor < 0 if higher.get(name) is None else not higher[name]
            metrics[column] = Metric(column, fitting[0], is_lower)
        elif figure is not None and expected in AGGREGATIONS:
            raise InputError(
                f"{source} does not give {column} of {task} in lm-eval's results: it is incomplete or was changed; "
                f"evaluate again"
            )
    return metrics


def columns_of(values: Values) -> list[str]:
    return [name for name in values if not name.startswith(WEIGHT)]


def choose(task: str, name: str | None, columns: Iterable[str]) -> str:
    """Choose a column of a task: by its name or that of its metric, or the preferred one."""

    columns = list(columns)
    candidates = [column for column in columns if name is None or name in (column, metric_name(column))]
    if not candidates:
        all_columns = ", ".join(columns)
        raise InputError(f"{task} has no metric {name or ''} of all questions; it has {all_columns}; name another")

    def preference(column: str) -> tuple[int, int]:
        """Prefer `PREFERRED_METRICS`, then pass@N by its N, then the first of all others."""
        metric = metric_name(column)
        if metric in PREFERRED_METRICS:
            return 2, -PREFERRED_METRICS.index(metric)
        count = metric.removeprefix("pass@")
        return (1, int(count)) if metric.startswith("pass@") and count.isdigit() else (0, 0)

    return max(candidates, key=preference)


def metric_name(column: str) -> str:
    return column.partition(",")[0]
