"""Classes of tasks: with accuracy by level and subject, pass@k, the metric of papers, and fixed windows.

```yaml
include: ../_chat_answer # for pass@k: include: [prune_gsm8k.yaml, ../_pass], and repeats: 8
task: prune_mine
dataset_kwargs: {prune_data: asdiv_a, prune_test: all}
process_results: !function lmeval_prune.tasks.scorers.number
```
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lm_eval.api.metrics import mean, mean_stderr
from lm_eval.api.task import ConfigurableTask

from lmeval_prune.errors import InputError, print_input_errors
from lmeval_prune.scoring import MARKED, same_text
from lmeval_prune.tasks.scorers import EQUALITIES, Scores, mathematics
from lmeval_prune.tasks.tries import attempts, majority, pass_scores

PARTS = ("level", "complexity", "grade", "subject")  # accuracy is reported for each value of these fields


class ScoredTask(ConfigurableTask):
    """Reports the metrics of its `process_results` function, and the main metric for each part of the documents.

    Parts are the levels, complexities, grades and subjects of the documents: `level_1`, `complexity_low`, `algebra`.
    """

    main = "exact_match"  # the metric that is reported for parts
    prefix = ""  # of the names of parts

    @print_input_errors
    def __init__(self, config: dict[str, Any]) -> None:
        # the metrics come from `aggregation`; without this empty list lm-eval adds its default metrics
        config = {key: value for key, value in config.items() if key != "class"} | {"metric_list": []}
        super().__init__(config=config)
        self.score: Callable[[dict[str, Any], Sequence[str]], Scores] = config["process_results"]
        self.shares = ["strict_match", "unmarked", *(["timeouts"] if self.score is mathematics else [])]
        self.means = [self.main, *self.shares]  # over the documents
        self.parts = self._parts_of(self.eval_docs)

    def build_all_requests(self, **options: Any) -> None:
        """Build the requests; parts without a question in this run are not reported."""
        super().build_all_requests(**options)
        docs: Any = self.eval_docs
        count = min(int(options.get("limit") or len(docs)), len(docs))
        self.parts = self._parts_of(docs.select(options.get("samples") or range(count)))

    def _parts_of(self, docs: Any) -> dict[str, tuple[str, Any]]:
        """Return field and value of each part, by the name of its metric."""
        parts: dict[str, tuple[str, Any]] = {}
        for field in (field for field in PARTS if field in docs.column_names):
            for value in sorted({value for value in docs[field] if value}):
                name = str(value) if field == "subject" else f"{field}_{value}"
                name = re.sub(r"\W+", "_", name.replace("&", "and")).lower()
                parts[self.prefix + name] = (field, value)
        return parts

    def override_metric(self, metric_name: str) -> None:
        """Compute no other metric than this, for `lm_eval --predict_only`."""
        super().override_metric(metric_name)
        self.set_config("process_results", None)

    def process_results(self, doc: dict[str, Any], results: Sequence[Any]) -> Scores:
        """Return the metrics of a response, and the main metric for each part; None for parts of other documents."""
        if not callable(self.config.process_results):  # lm_eval --predict_only
            return {"bypass": 0.0}
        scores = self.scores(doc, results[0])
        parts = {
            name: scores[self.main] if doc[field] == value else None
            for part, (field, value) in self.parts.items()
            for name in part_metrics(part)
        }
        return {**scores, **parts}

    def scores(self, doc: dict[str, Any], response: Any) -> Scores:
        return self.score(doc, [response])

    def aggregation(self) -> dict[str, Callable[..., Any]]:
        """Return the aggregations; `extracted` and `how` become the shares of responses with a (marked) answer."""
        means: dict[str, Callable[..., Any]] = dict.fromkeys(self.means, mean)
        for part in self.parts:
            means |= part_metrics(part)
        return {**super().aggregation(), **means, "extracted": answered, "how": marked}

    def higher_is_better(self) -> dict[str, bool]:
        return {name: name not in ("timeouts", "unmarked") for name in self.aggregation()}


def part_metrics(name: str) -> dict[str, Callable[..., Any]]:
    """Return the aggregations of a part: accuracy, its standard error and the number of items, of values but None."""
    return {name: part_mean, f"{name}_stderr": part_stderr, f"{name}_n": lambda values: len(_known(values))}


def part_mean(values: Iterable[float | None]) -> float:
    return math.fsum(_known(values)) / len(_known(values))


def part_stderr(values: Iterable[float | None]) -> float | str:
    """Return the standard error of `part_mean`; `"N/A"` (JSON has no NaN) for fewer than two values."""
    return mean_stderr(_known(values)) if len(_known(values)) > 1 else "N/A"


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def answered(values: Iterable[str | list[str]]) -> float:
    return mean([bool(text) for text in _flat(values)])


def marked(values: Iterable[str | list[str]]) -> float:
    return mean([mark in MARKED for mark in _flat(values)])


def _flat(values: Iterable[str | list[str]]) -> list[str]:
    return [text for value in values for text in (value if isinstance(value, list) else [value])]


class PassAtTask(ScoredTask):
    """A generative task with N responses per document.

    Metrics for k = 1, 2, 4, …, N: `pass@k` (one of the *first* k responses is correct; for the ordered responses of a
    routed run) and `pass@k_unbiased` (1 − C(n−c, k)/C(n, k) for c correct of n responses; for random samples). Further
    metrics: `maj@N`; `distinct`, the number of different answers; the shares `strict_match` and `unmarked`; and
    `pass@N_SUBSET` for each subset of the documents (`level_1`, `algebra`, …). With k = N both estimators are equal.
    """

    @print_input_errors
    def __init__(self, config: dict[str, Any]) -> None:
        config = dict(config)
        config["generation_kwargs"] = {**(config.get("generation_kwargs") or {}), **config.pop("sampling", {})}
        count = self.attempts = int(config["repeats"])
        self.ks = attempts(count)
        self.main = f"pass@{count}"
        self.prefix = f"{self.main}_"  # followed by the name of a subset
        # Keep N responses. With several processes lm-eval may append copies, so that all processes have equally many.
        pipelines = config.get("filter_list")
        filters = [step for step in pipelines[0]["filter"] if step["function"] != "take_first"] if pipelines else []
        keep = {"function": "take_first_k", "k": count}
        config["filter_list"] = [{"name": "none", "filter": [keep, *filters]}]
        super().__init__(config)
        self.means = [*pass_scores([False] * count), f"maj@{count}", "distinct", *self.shares]

    @print_input_errors
    def scores(self, doc: dict[str, Any], response: Any) -> Scores:
        """Score each of the N responses, and return the metrics of all of them together.

        A function that is not of this package may give no extracted answers, of which there is no majority then.
        """
        scored = [self.score(doc, [text]) for text in list(response)[: self.attempts]]
        correct = [bool(score["exact_match"]) for score in scored]
        scores: Scores = dict(pass_scores(correct))
        if "extracted" in scored[0]:
            answers = [score["extracted"] for score in scored]
            winner, distinct = majority(answers, EQUALITIES.get(self.score, same_text))
            right = float(winner is not None and correct[winner])
            scores |= {f"maj@{self.attempts}": right, "distinct": float(distinct), "extracted": answers}
        if "how" in scored[0]:
            scores["how"] = [score["how"] for score in scored]
        return scores | {name: mean([score[name] for score in scored]) for name in self.shares if name in scored[0]}


class CustomaryTask(ConfigurableTask):
    """One of lm-eval's tasks with `score`: `acc_norm` if it has it (PIQA, HellaSwag, ARC, OpenBookQA), else `acc`.

    A group of these tasks reports the average `score`, as papers do.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def process_results(self, doc: dict[str, Any], results: Any) -> dict[str, Any]:
        scores = super().process_results(doc, results)
        return {**scores, "score": scores.get("acc_norm", scores.get("acc"))}

    def aggregation(self) -> dict[str, Callable[..., Any]]:
        return {**super().aggregation(), "score": mean}

    def higher_is_better(self) -> dict[str, bool]:
        return {**super().higher_is_better(), "score": True}


class WindowedTask(ConfigurableTask):
    """A rolling log-likelihood task with windows of `window` tokens; `InputError` if `max_length` is another number.

    The model cuts the windows at its `max_length`. The task reads it from the run's metadata, to which lm-eval adds the
    model_args.
    """

    @print_input_errors
    def __init__(self, config: dict[str, Any]) -> None:
        window, length = config["window"], (config.get("metadata") or {}).get("max_length")
        if str(length) != str(window):
            raise InputError(
                f"{config.get('task')} at sequence length {window} needs max_length={window} among the --model_args "
                f"(in Python also metadata={{'max_length': {window}}}); max_length is {length or 'not given'}"
            )
        super().__init__(config={key: value for key, value in config.items() if key not in ("class", "window")})
