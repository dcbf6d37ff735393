"""Choice of the compared metric of a task, and how lm-eval aggregates its samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lmeval_prune.comparison.samples import WEIGHT
from lmeval_prune.errors import InputError

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
    figure in lm-eval's results.

    Args:
        values: values of all questions.
        results: lm-eval's results.
        task: name of the task.
        source: file with the samples.
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
        fitting = [
            aggregation
            for aggregation in (AGGREGATIONS[name] for name in names if name in AGGREGATIONS)
            if aggregation.is_weighted == (weights is not None)
            and (weights is None or ((weights >= 0).all() and weights.any()))  # else pairs of something else
            and (
                figure is None or math.isclose(aggregate(aggregation, own, weights), figure, rel_tol=1e-5, abs_tol=1e-9)
            )
        ]
        if fitting:
            is_lower = fitting[0].factor < 0 if higher.get(name) is None else not higher[name]
            metrics[column] = Metric(column, fitting[0], is_lower)
        elif figure is not None and expected in AGGREGATIONS:
            raise InputError(
                f"{source} does not give {column} of {task} in lm-eval's results: it is incomplete or was changed; "
                f"evaluate again"
            )
    return metrics


def aggregate(aggregation: Aggregation, values: np.ndarray, weights: np.ndarray | None) -> float:
    """Return the metric of all samples, as lm-eval computes it."""
    mean = aggregation.factor * (values.mean() if weights is None else values.sum() / weights.sum())
    with np.errstate(over="ignore"):
        return float(np.exp(mean) if aggregation.is_exponential else mean)


def columns_of(values: Values) -> list[str]:
    """Return the `METRIC,FILTER` columns."""
    return [name for name in values if not name.startswith(WEIGHT)]


def choose(task: str, name: str | None, columns: Iterable[str]) -> str:
    """Choose a column of a task: by its name or that of its metric, or the preferred one."""
    columns = list(columns)
    if candidates := [column for column in columns if name is None or name in (column, metric_name(column))]:
        return max(candidates, key=_preference)
    raise InputError(f"{task} has no metric {name or ''} of all questions; it has {', '.join(columns)}; name another")


def metric_name(column: str) -> str:
    """Return the metric of a `METRIC,FILTER`."""
    return column.partition(",")[0]


def _preference(column: str) -> tuple[int, int]:
    """Return a sort key that ranks `PREFERRED_METRICS` highest, then pass@N by its N, then all others.

    Of equal keys, `max` takes the first column.
    """
    metric = metric_name(column)
    if metric in PREFERRED_METRICS:
        return 2, -PREFERRED_METRICS.index(metric)
    count = metric.removeprefix("pass@")
    return (1, int(count)) if metric.startswith("pass@") and count.isdigit() else (0, 0)
