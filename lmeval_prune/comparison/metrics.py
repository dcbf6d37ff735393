"""Choice of the compared metric of a task, and how lm-eval aggregates its samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NotRequired

import numpy as np
import pandas as pd
from typing_extensions import TypedDict

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
    """The compared metric of a task."""

    column: str  # `METRIC,FILTER`
    aggregation: Aggregation = Aggregation()
    lower_is_better: bool = False


class _MetricEntry(TypedDict):
    metric: str
    aggregation: NotRequired[str | None]
    higher_is_better: NotRequired[bool | None]


class _Metadata(TypedDict, total=False):
    question_field: str | None


class _Config(TypedDict, total=False):
    output_type: str | None
    metric_list: list[_MetricEntry] | None
    filter_list: list[dict[str, Any]] | None
    metadata: _Metadata | None


class _Figures(TypedDict, total=False):
    sample_len: int


class Results(TypedDict):
    """Fields of lm-eval's results that comparisons read."""

    results: dict[str, _Figures]
    configs: NotRequired[dict[str, _Config]]
    higher_is_better: NotRequired[dict[str, dict[str, bool | None] | None]]


KnownMetrics = dict[str, dict[str, Metric]]  # by task and `METRIC,FILTER`


def known_metrics(outcomes: pd.DataFrame, results: Results, source: Path) -> KnownMetrics:
    """Return the metrics that are a function of a mean over the questions that have a value.

    Others (F1, BLEU) are left out: lm-eval's configuration of the task names another aggregation, or none gives the
    figure in lm-eval's results.

    Args:
        outcomes: a row for each question: `task`, and the values of metrics by `METRIC,FILTER`.
        results: lm-eval's results.
        source: file or folder with the samples.
    """
    metrics = {}
    for task, rows in outcomes.groupby("task", sort=False):
        metrics[str(task)] = {
            column: Metric(column, aggregation, _is_lower_better(str(task), _name(column), aggregation, results))
            for column, aggregation in _aggregations(rows, str(task), results, source).items()
        }
    return metrics


def _is_lower_better(task: str, metric: str, aggregation: Aggregation, results: Results) -> bool:
    """Return whether lower is better: as the results say, else by the aggregation."""
    higher = (results.get("higher_is_better", {}).get(task) or {}).get(metric)
    return aggregation.factor < 0 if higher is None else not higher


def choose_metrics(metrics_by_task: KnownMetrics, name: str | None, advice: str) -> dict[str, Metric]:
    """Choose the compared metric of each task; refuse metrics that cannot be averaged.

    Args:
        metrics_by_task: see `known_metrics`.
        name: `METRIC` or `METRIC,FILTER`; None for the default (see `_preference`).
        advice: end of a message: how to name another metric.
    """
    chosen = {}
    for task, metrics in metrics_by_task.items():
        chosen[task] = metrics[_choose(task, name, metrics, advice)]
    if len({(metric.lower_is_better, metric.aggregation) for metric in chosen.values()}) > 1:
        names = ", ".join(f"{metric.column} of {task}" for task, metric in chosen.items())
        raise InputError(
            f"higher is better for some of {names}, lower for others, or they are no means of the same "
            f"kind; give `metric: NAME`"
        )
    return chosen


def columns_of(outcomes: pd.DataFrame) -> list[str]:
    """Return the `METRIC,FILTER` columns of a table of outcomes."""
    return [name for name in outcomes.columns if "," in name and not name.startswith(WEIGHT)]


def _choose(task: str, name: str | None, metrics: Mapping[str, Any], advice: str) -> str:
    """Choose a metric of a task: `name` (a metric or column), or the preferred."""
    if candidates := [column for column in metrics if name is None or name in (column, _name(column))]:
        return max(candidates, key=_preference)
    raise InputError(f"{task} has no metric {name or ''} of all questions; it has {', '.join(metrics)}; {advice}")


def _aggregations(rows: pd.DataFrame, task: str, results: Results, source: Path) -> dict[str, Aggregation]:
    """Return how lm-eval aggregates the metrics of a task, by `METRIC,FILTER`; see `known_metrics`."""
    entries: list[_MetricEntry] = results.get("configs", {}).get(task, {}).get("metric_list") or []
    declared = {entry["metric"]: entry.get("aggregation") for entry in entries}
    figures: Mapping[str, Any] = results["results"].get(task, {})
    aggregations: dict[str, Aggregation] = {}
    for column in columns_of(rows):
        has_value = rows[column].notna()
        values = rows[column][has_value]
        weights = rows.get(WEIGHT + column, pd.Series(np.nan, rows.index))[has_value]
        if values.empty or _name(column) == "bypass":  # of `--predict_only`
            continue
        is_weighted = bool(weights.notna().any())
        expected = declared.get(_name(column)) or DEFAULT_AGGREGATIONS.get(_name(column))
        figure = figures.get(column)
        if isinstance(figure, float) and math.isnan(figure):  # a question has no value
            figure = None
        names = [expected or "mean"] if figure is None else [expected, *AGGREGATIONS]
        fitting = [
            aggregation
            for aggregation in (AGGREGATIONS[name] for name in names if name in AGGREGATIONS)
            if aggregation.is_weighted == is_weighted
            and (not is_weighted or ((weights >= 0).all() and weights.any()))  # else pairs of something else
            and (
                figure is None
                or math.isclose(aggregate(aggregation, values, weights), figure, rel_tol=1e-5, abs_tol=1e-9)
            )
        ]
        if fitting:
            aggregations[column] = fitting[0]
        elif figure is not None and expected in AGGREGATIONS:
            raise InputError(
                f"{source} does not give {column} of {task} in lm-eval's results: it is incomplete or was changed; "
                f"evaluate again"
            )
    return aggregations


def aggregate(aggregation: Aggregation, values: pd.Series, weights: pd.Series) -> float:
    """Return the metric of all samples, as lm-eval computes it."""
    mean = aggregation.factor * (values.sum() / weights.sum() if aggregation.is_weighted else values.mean())
    with np.errstate(over="ignore"):
        return float(np.exp(mean) if aggregation.is_exponential else mean)


def values_of(outcomes: pd.DataFrame, metrics: Mapping[str, Metric], advice: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the compared values of all questions (of perplexities, in nats) and their weights, each (questions,)."""
    values, weights = np.full(len(outcomes), np.nan), np.ones(len(outcomes))
    for task, metric in metrics.items():
        rows = (outcomes["task"] == task).to_numpy()
        column = metric.column
        if column not in outcomes or not np.isfinite(outcomes[column][rows]).all():
            complete = [name for name in columns_of(outcomes) if np.isfinite(outcomes[name][rows]).all()]
            _choose(task, column, dict.fromkeys(complete), advice)
        values[rows] = metric.aggregation.factor * outcomes[column][rows]
        if metric.aggregation.is_weighted:
            weights[rows] = outcomes[WEIGHT + column][rows]
    return values, weights


def _name(column: str) -> str:
    return column.partition(",")[0]


def _preference(column: str) -> tuple[int, int]:
    """Return a sort key that ranks `PREFERRED_METRICS` highest, then pass@N by its N, then all others.

    Of equal keys, `max` takes the first column.
    """
    metric = _name(column)
    if metric in PREFERRED_METRICS:
        return 2, -PREFERRED_METRICS.index(metric)
    count = metric.removeprefix("pass@")
    return (1, int(count)) if metric.startswith("pass@") and count.isdigit() else (0, 0)
