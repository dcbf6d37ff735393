"""Several attempts at a task's documents, each right or wrong by the task's filter and metric; and pass@k of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmeval_prune.errors import InputError
from lmeval_prune.tasks import compat


def choose_metric(task: Any, metric: str | None = None) -> tuple[str, str]:
    """Return the names of a metric and of a filter, and remove the task's other filters.

    Args:
        task: a loaded generative task.
        metric: `METRIC` or `METRIC,FILTER`; default: `exact_match` or the task's first metric, with its first filter.
    """
    name, _, filter_name = (metric or "").partition(",")
    chosen = filter_name or task._filters[0].name
    task._filters = [ensemble for ensemble in task._filters if ensemble.name == chosen]
    names = [entry["metric"] for entry in task.get_config("metric_list") or []]
    return name or ("exact_match" if "exact_match" in names or not names else str(names[0])), chosen


def filtered(task: Any, singles: Sequence[Any]) -> list[Any]:
    """Apply the filter of a task that has one filter to requests with one response each."""
    (ensemble,) = task._filters
    ensemble.apply(singles)
    return [single.filtered_resps[ensemble.name] for single in singles]


def is_right(task: Any, scores: Mapping[str, Any], metric: str) -> bool:
    """Return whether a response is right; `InputError` if the metric is not 0 or 1."""
    try:
        value = float(scores[metric])
    except (KeyError, TypeError, ValueError):  # the task has no such metric, or one of the whole corpus
        value = math.nan
    if value not in (0.0, 1.0):
        numbers = ", ".join(f"{k}={v}" for k, v in scores.items() if isinstance(v, int | float))
        raise InputError(
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


# --------------------------------------------------------------------------- metrics of several attempts


def attempts(count: int) -> list[int]:
    """Return 1, 2, 4, … up to `count`, and `count` itself."""
    return sorted({1 << i for i in range(count.bit_length())} | {count})


def pass_ordered(right: Sequence[bool], k: int) -> bool:
    """Return whether any of the first k attempts is right: for candidates that stand in an order (a router's)."""
    return any(right[:k])


def pass_unbiased(n: int, c: int, k: int) -> float:
    """Return 1 − C(n−c, k)/C(n, k): the chance that k of n exchangeable attempts, c of them right, hold a right one."""
    if k > n:
        raise ValueError(f"{k} of {n} attempts cannot be drawn")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(answers: Sequence[str], same: Callable[[str, str], bool]) -> tuple[int | None, int]:
    """Return the attempt whose answer is the most frequent (the first among equals), and how many answers differ.

    Empty answers do not count.
    """
    counts: dict[int, int] = {}  # of the first attempt with each answer
    for i, text in enumerate(answers):
        if text:
            first = next((k for k in counts if answers[k] == text or same(text, answers[k])), i)
            counts[first] = counts.get(first, 0) + 1
    return max(counts, key=lambda first: counts[first], default=None), len(counts)


def pass_scores(right: Sequence[bool]) -> dict[str, float]:
    """Return `pass@k` and `pass@k_unbiased` of N attempts for k = 1, 2, 4, …, N."""
    ks = attempts(len(right))
    ordered = {f"pass@{k}": float(pass_ordered(right, k)) for k in ks}
    return ordered | {f"pass@{k}_unbiased": pass_unbiased(len(right), sum(right), k) for k in ks}
