"""Tasks that are scored by the functions in `results`, with accuracy by level, subject, …

```yaml
include: ../_chat_answer
task: prune_mine
dataset_kwargs: {prune_data: asdiv_a, prune_test: all}
process_results: !function lmeval_prune.tasks.results.number
```
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lm_eval.api.metrics import mean, mean_stderr
from lm_eval.api.task import ConfigurableTask

from lmeval_prune.errors import print_input_errors
from lmeval_prune.scoring import MARKED
from lmeval_prune.tasks.results import Scores, mathematics

PARTS = ("level", "complexity", "grade", "subject")  # accuracy is reported for each value of these fields


class ScoredTask(ConfigurableTask):
    """Reports the metrics of its `process_results` function, and the main metric for each part of the documents.

    Parts are the levels, complexities, grades and subjects of the documents: `level_1`, `complexity_low`, `algebra`.

    Attributes:
        main: the metric that is reported for parts.
        means: metrics that are means over the documents.
        parts: field and value of each part, by the name of its metric.
    """

    main = "exact_match"
    prefix = ""  # of the names of parts

    @print_input_errors
    def __init__(self, config: dict[str, Any]) -> None:
        # the metrics come from `aggregation`; without this empty list lm-eval adds its default metrics
        config = {key: value for key, value in config.items() if key != "class"} | {"metric_list": []}
        super().__init__(config=config)
        self.score: Callable[[dict[str, Any], Sequence[str]], Scores] = config["process_results"]
        self.times_out = self.score is mathematics
        self.parts = self._parts_of(self.eval_docs)

    def build_all_requests(self, **options: Any) -> None:
        """Build the requests; parts without a question in this run are not reported."""
        super().build_all_requests(**options)
        docs: Any = self.eval_docs
        count = min(int(options.get("limit") or len(docs)), len(docs))
        self.parts = self._parts_of(docs.select(options.get("samples") or range(count)))

    def _parts_of(self, docs: Any) -> dict[str, tuple[str, Any]]:
        parts: dict[str, tuple[str, Any]] = {}
        for field in (field for field in PARTS if field in docs.column_names):
            for value in sorted({value for value in docs[field] if value}):
                name = str(value) if field == "subject" else f"{field}_{value}"
                name = re.sub(r"\W+", "_", name.replace("&", "and")).lower()
                parts[self.prefix + name] = (field, value)
        return parts

    @property
    def means(self) -> list[str]:
        """Return the metrics that are means over the documents."""
        return [self.main, *self._shares]

    @property
    def _shares(self) -> list[str]:
        return ["strict_match", "unmarked", *(["timeouts"] if self.times_out else [])]

    def override_metric(self, metric_name: str) -> None:
        """Compute no other metric than this, for `lm_eval --predict_only`."""
        super().override_metric(metric_name)
        self.set_config("process_results", None)

    def process_results(self, doc: dict[str, Any], results: Sequence[Any]) -> Scores:
        """Return the metrics of a response, and the main metric for each part; None for parts of other documents."""
        if not callable(self.config.process_results):  # lm_eval --predict_only
            return {"bypass": 0.0}
        scores = self.scores(doc, self.response(results))
        parts = {
            name: scores[self.main] if doc[field] == value else None
            for part, (field, value) in self.parts.items()
            for name in part_metrics(part)
        }
        return {**scores, **parts}

    def response(self, results: Sequence[Any]) -> Any:
        """Return what `scores` takes, from the argument of `process_results`."""
        return results[0]

    def scores(self, doc: dict[str, Any], response: Any) -> Scores:
        """Return the metrics of a response."""
        return self.score(doc, [response])

    def aggregation(self) -> dict[str, Callable[..., Any]]:
        """Return the aggregations; `extracted` and `how` become the shares of responses with a (marked) answer."""
        answers = {"extracted": answered, "how": marked}
        means: dict[str, Callable[..., Any]] = dict.fromkeys(self.means, mean)
        for part in self.parts:
            means |= part_metrics(part)
        return {**super().aggregation(), **means, **answers}

    def higher_is_better(self) -> dict[str, bool]:
        """Return True for all but `timeouts` and `unmarked`."""
        return {name: name not in ("timeouts", "unmarked") for name in self.aggregation()}


def part_metrics(name: str) -> dict[str, Callable[..., Any]]:
    """Return the aggregations of a part: accuracy, its standard error and the number of items."""
    return {name: part_mean, f"{name}_stderr": part_stderr, f"{name}_n": part_count}


def part_mean(values: Iterable[float | None]) -> float:
    """Return the mean of the values that are not None."""
    items = [value for value in values if value is not None]
    return math.fsum(items) / len(items)


def part_stderr(values: Iterable[float | None]) -> float | str:
    """Return the standard error of `part_mean`; `"N/A"` (JSON has no NaN) for fewer than two values."""
    items = [value for value in values if value is not None]
    return mean_stderr(items) if len(items) > 1 else "N/A"


def part_count(values: Iterable[float | None]) -> int:
    """Return the number of values that are not None."""
    return sum(value is not None for value in values)


def answered(values: Iterable[str | list[str]]) -> float:
    """Return the share of responses with an answer."""
    return mean([bool(text) for text in _flat(values)])


def marked(values: Iterable[str | list[str]]) -> float:
    """Return the share of responses with a marked answer (boxed, `####`, 'the answer is')."""
    return mean([mark in MARKED for mark in _flat(values)])


def _flat(values: Iterable[str | list[str]]) -> list[str]:
    return [text for value in values for text in (value if isinstance(value, list) else [value])]
