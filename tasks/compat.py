"""What differs between lm-eval 0.4.13, its main branch and 0.5.

lm-eval 0.5 has a class of tasks for each type of request, and scorers: a scorer filters the responses, computes the
metrics of its filter, reduces the scores of several responses to one, and aggregates. There `process_results` gets the
filtered responses instead of a list with them, and returns a list where there are scores of several responses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from lm_eval.api import task as _tasks
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean

HAS_SCORERS = hasattr(_tasks.Task, "process_instances")
GenerateTask: Any = _tasks.GenerateTask if HAS_SCORERS else _tasks.ConfigurableTask
MultipleChoiceTask: Any = _tasks.MultipleChoiceTask if HAS_SCORERS else _tasks.ConfigurableTask
RollingTask: Any = _tasks.LoglikelihoodRollingTask if HAS_SCORERS else _tasks.ConfigurableTask


def sample_size(task: Any, limit: float | None) -> int | None:
    """Return the number of documents that `--limit` selects; None for all."""
    if limit is None:
        return None
    return math.ceil(len(task.eval_docs) * limit) if limit < 1 else int(limit)


def max_length(config: Any, tokenizer: Any) -> int:
    """Return the context length of a model, as `hf` of the installed lm-eval determines it."""
    from lm_eval.models import utils
    from lm_eval.models.huggingface import HFLM

    if hasattr(utils, "resolve_max_length"):
        return int(utils.resolve_max_length(config, tokenizer))
    default, model = HFLM._DEFAULT_MAX_LENGTH, SimpleNamespace(config=config)
    lm = SimpleNamespace(_max_length=None, _DEFAULT_MAX_LENGTH=default, model=model, tokenizer=tokenizer)
    return int(HFLM.max_length.fget(lm))


def rolling_response(log_likelihood: float) -> float | tuple[float, bool]:
    """Return what a model answers to a request of type `loglikelihood_rolling`."""
    return (log_likelihood, False) if HAS_SCORERS else log_likelihood


class LoadedTasks:
    """A task manager for `simple_evaluate` that has tasks already loaded; 0.5's own takes names only."""

    def __init__(self, tasks: dict[str, Any]) -> None:
        self.tasks = tasks
        self.task_index: dict[str, Any] = {}  # 0.4 logs the file of a task from it

    def load(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the named tasks."""
        return {"tasks": {name: self.tasks[name] for name in names}, "groups": {}, "group_map": {}}


def filters(task: Any) -> list[Any]:
    """Return the filters of a task: objects with a name that are applied to requests."""
    return [scorer.filter for scorer in task.scorers] if HAS_SCORERS else list(getattr(task, "_filters", ()))


def as_metric(name: str) -> Callable[[Callable[..., dict[str, float]]], Any]:
    """Return a decorator that makes a metric for `metric_list` of a function.

    The function gets a document's gold answers, its responses and the metric's arguments, and returns scores by name.
    """

    def decorate(function: Callable[..., dict[str, float]]) -> Any:
        @functools.wraps(function)
        def compute(references: Sequence[Any], predictions: Sequence[Any], **arguments: Any) -> dict[str, Any]:
            responses = predictions if HAS_SCORERS else predictions[0]
            golds = references[0] if isinstance(references[0], list) else references
            scores = function(golds, [responses] if isinstance(responses, str) else list(responses), **arguments)
            if not HAS_SCORERS:
                return scores
            return as_results({key if key == name else f"{key}({name})": value for key, value in scores.items()})

        if not HAS_SCORERS:
            return compute
        from lm_eval.api.metrics import Metric

        return Metric(name, compute, aggregation=mean, output_type={"generate_until"})

    return decorate


def metrics(task: Any) -> list[tuple[str, Any, dict[str, Any]]]:
    """Return the name, function and arguments of each metric of a task."""
    if HAS_SCORERS:
        return [
            (metric.name, metric.fn, dict(metric.kwargs)) for scorer in task.scorers for metric in scorer.metrics or ()
        ]
    arguments = getattr(task, "_metric_fn_kwargs", {})
    return [(name, function, arguments[name]) for name, function in getattr(task, "_metric_fn_list", {}).items()]


def without_metrics(task: Any) -> None:
    """Remove the default metrics that 0.5 adds to a task without metrics."""
    for scorer in task.scorers if HAS_SCORERS else ():
        scorer.metrics = []


def keep_filter(task: Any, name: str) -> None:
    """Remove the other filters of a task."""
    if HAS_SCORERS:
        task._scorers = [scorer for scorer in task.scorers if scorer.name == name]
    else:
        task._filters = [ensemble for ensemble in task._filters if ensemble.name == name]


def all_responses(results: Any) -> Any:
    """Return the filtered responses to a document from the argument of `process_results`."""
    return results if HAS_SCORERS else results[0]


def as_results(scores: dict[str, Any]) -> dict[str, Any]:
    """Return the scores of a document as `process_results` has to return them."""
    return {name: [value] for name, value in scores.items()} if HAS_SCORERS else scores


def request(
    kind: str, arguments: tuple[Any, ...], task: str, doc_id: int, repeats: int = 1, doc: Any = None, **fields: Any
) -> Instance:
    """Return a request as lm-eval builds it; `arguments` are those of 0.4."""
    doc = {} if doc is None else doc
    if not HAS_SCORERS:
        return Instance(kind, doc, arguments, idx=0, metadata=(task, doc_id, repeats), **fields)
    if kind == "loglikelihood_rolling":
        arguments = "", *arguments
    return Instance(kind, doc, arguments, task, idx=0, doc_id=doc_id, repeats=repeats, **fields)


def score_response(task: Any, process_results: Any, doc: Any, response: Any) -> dict[str, Any]:
    """Return the metrics of one filtered response, by `process_results` or by the metrics of a task with one filter."""
    if not HAS_SCORERS:
        return dict(process_results(doc, [response]))
    scores = process_results(doc, response)
    if scores is not None:
        return {name: value[0] if isinstance(value, list) else value for name, value in scores.items()}
    (scorer,) = task.scorers
    filtered = {"target": task.doc_to_target(doc), "filtered_resps": {scorer.name: response}}
    instance = request("generate_until", ("", {}), task.task_name, 0, doc=doc, **filtered)
    return dict(scorer.reduce(scorer.score_instances({0: [instance]}))[0])


def aggregate(task: Any, bootstrap_iters: int | None) -> tuple[dict[str, Any], int]:
    """Aggregate a task's scores for lm-eval 0.5, with standard errors of means only, as in 0.4.

    Its own method would bootstrap all other aggregations.
    """
    functions = task.aggregation()
    figures: dict[str, Any] = {}
    count = 0
    for scorer in task.scorers:
        for are_means, draws in ((True, bootstrap_iters), (False, 0)):
            documents = {
                doc_id: {name: value for name, value in scores.items() if (functions.get(name) is mean) == are_means}
                for doc_id, scores in scorer.reduced_docs.items()
            }
            aggregated, size = scorer.aggregate(documents, draws, aggregation_overrides=functions)
            figures |= aggregated
            count = max(count, size)
    return figures, count
