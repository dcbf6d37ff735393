"""Score single responses to a task's documents, each by the task's own filter and metric, as right or wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lmeval_prune.errors import InputError
from lmeval_prune.tasks import compat


def choose_metric(task: Any, metric: str | None = None) -> tuple[str, str]:
    """Return the names of a metric and of a filter, and remove the task's other filters.

    Args:
        task: a loaded generative task.
        metric: `METRIC` or `METRIC,FILTER`; default: `exact_match` or the task's first metric, with its first filter.
    """
    filters = [ensemble.name for ensemble in compat.filters(task)]
    name, _, filter_name = (metric or "").partition(",")
    chosen = filter_name or filters[0]
    task._filters = [ensemble for ensemble in task._filters if ensemble.name == chosen]
    return name or _default_metric(task), chosen


def _default_metric(task: Any) -> str:
    names = [entry["metric"] for entry in task.get_config("metric_list") or []]
    return "exact_match" if "exact_match" in names or not names else str(names[0])


def filtered(task: Any, singles: Sequence[Any]) -> list[Any]:
    """Apply the filter of a task that has one filter to requests with one response each."""
    (ensemble,) = compat.filters(task)
    ensemble.apply(singles)
    return [single.filtered_resps[ensemble.name] for single in singles]


class NoOutcomeError(InputError):
    """A metric that does not say whether a response is right."""


def is_right(task: Any, scores: Mapping[str, Any], metric: str) -> bool:
    """Return whether a response is right; `NoOutcomeError` if the metric is not 0 or 1."""
    try:
        value = float(scores[metric])
    except (KeyError, TypeError, ValueError):  # the task has no such metric, or one of the whole corpus
        value = math.nan
    if value not in (0.0, 1.0):
        numbers = ", ".join(f"{k}={v}" for k, v in scores.items() if isinstance(v, int | float))
        raise NoOutcomeError(
            f"task {task.task_name}: {metric} is not a metric with values 0 and 1; name another"
            + (f", of {numbers}" if numbers else " task")
        )
    return bool(value)


def outcomes(task: Any, metric: str, documents: Sequence[Any], responses: Sequence[str]) -> list[bool]:
    """Return whether each response, to the document of the same place, is right; after `choose_metric`."""
    singles = [
        compat.request("generate_until", ("", {}), task.task_name, number, doc=document, resps=[response])
        for number, (document, response) in enumerate(zip(documents, responses, strict=True))
    ]
    scores = (
        task.process_results(document, [response])
        for document, response in zip(documents, filtered(task, singles), strict=True)
    )
    return [is_right(task, result, metric) for result in scores]
