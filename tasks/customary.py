"""lm-eval's tasks with one more metric, the one that papers report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask


class CustomaryTask(ConfigurableTask):
    """Adds `score`: `acc_norm` if the task has it (PIQA, HellaSwag, ARC, OpenBookQA), else `acc`.

    A group of these tasks reports the average `score`, as papers do.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def process_results(self, doc: dict[str, Any], results: Any) -> dict[str, Any]:
        """Return lm-eval's results and `score`."""
        scores = super().process_results(doc, results)
        return {**scores, "score": scores.get("acc_norm", scores.get("acc"))}

    def aggregation(self) -> dict[str, Callable[..., Any]]:
        """Return lm-eval's aggregations, and the mean for `score`."""
        return {**super().aggregation(), "score": mean}

    def higher_is_better(self) -> dict[str, bool]:
        """Return lm-eval's directions, and True for `score`."""
        return {**super().higher_is_better(), "score": True}
