"""pass@k, maj@N and the number of distinct answers, for any of our tasks with `repeats: N`.

```yaml
include: [prune_gsm8k.yaml, ../_pass] # or, for another N: include: prune_gsm8k_pass8.yaml
task: prune_gsm8k_pass8
repeats: 8
```
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask

from lmeval_prune.errors import InputError
from lmeval_prune.scoring.passes import attempts, majority, pass_ordered, pass_unbiased
from lmeval_prune.tasks import aggregations, results


class PassAtTask(ConfigurableTask):
    """A generative task that is tried N times a document.

    Metrics, for k = 1, 2, 4, … up to N: `pass@k` (any of the *first* k is right: for candidates in an
    order, a router's) and `pass@k_unbiased` (1 − C(n−c, k)/C(n, k): for exchangeable candidates, samples);
    `maj@N`; `distinct`, the number of different answers. For each part of the documents that the base task reports
    (`level_1`, `complexity_low`, `grade_1`, …), and for each subject, `pass@N_PART`: both estimators are one there.

    Raises:
        InputError: `repeats` is not a whole number above 0, or the task has no `process_results`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        config = dict(config)
        config.pop("class", None)
        config["generation_kwargs"] = {**(config.get("generation_kwargs") or {}), **config.pop("sampling", {})}
        count = config.get("repeats")
        if not isinstance(count, int) or count < 1:
            raise InputError(f"task {config.get('task')}: repeats must be a whole number above 0, not {count!r}")
        if not callable(config.get("process_results")):
            raise InputError(f"task {config.get('task')}: pass@k needs a task with a process_results function")
        self.attempts = count
        self.times_out = any(metric["metric"] == "timeouts" for metric in config.get("metric_list") or [])
        # Ranks are padded with copies of the last request, so exactly N are kept; other filters stay as they are.
        filters = (config.get("filter_list") or [{"filter": []}])[0]["filter"]
        filters = [step for step in filters if step["function"] != "take_first"]
        keep = {"function": "take_first_k", "k": count}
        config["filter_list"] = [{"name": "none", "filter": [keep, *filters]}]
        super().__init__(config=config)
        names = [metric["metric"] for metric in config.get("metric_list") or []]
        self.parts = [name for name in names if name.startswith(("level_", "complexity_", "grade_"))]
        test = self.dataset[self.config.test_split]
        subjects = sorted(set(test["subject"])) if "subject" in test.column_names else []
        self.subjects = {re.sub(r"\W+", "_", subject.replace("&", "and")).lower(): subject for subject in subjects}

    @property
    def ks(self) -> list[int]:
        """The k that are reported."""
        return attempts(self.attempts)

    @property
    def _all(self) -> str:
        return f"pass@{self.attempts}"

    def process_results(self, doc: dict[str, Any], responses: Sequence[Any]) -> dict[str, Any]:
        """Score N responses one by one with the base task, then together."""
        base: Callable[..., dict[str, Any]] = self.config.process_results  # type: ignore[assignment]
        texts = list(responses[0])[: self.attempts]
        scored = [base(doc, [text]) for text in texts]
        right = [bool(score["exact_match"]) for score in scored]
        answers = [score["extracted"] for score in scored]
        vote, distinct = majority(answers, results.SAME.get(base, results.same_text))
        parts = {name: scored[0][name] is not None for name in self.parts}
        parts |= {name: doc["subject"] == subject for name, subject in self.subjects.items()}
        return {
            **{f"pass@{k}": float(pass_ordered(right, k)) for k in self.ks},
            **{f"pass@{k}_unbiased": pass_unbiased(len(right), sum(right), k) for k in self.ks},
            **{f"{self._all}_{name}": float(any(right)) if belongs else None for name, belongs in parts.items()},
            f"maj@{self.attempts}": float(vote is not None and right[vote]),
            "distinct": float(distinct),
            "extracted": answers,
            "how": [score["how"] for score in scored],
            **({"timeouts": mean([score["timeouts"] for score in scored])} if self.times_out else {}),
        }

    def aggregation(self) -> dict[str, Callable[..., Any]]:
        """Means; of `extracted` and `how`, the shares of responses with an answer and with a marked one."""
        names = [f"pass@{k}{end}" for k in self.ks for end in ("", "_unbiased")] + [f"maj@{self.attempts}", "distinct"]
        names += ["timeouts"] if self.times_out else []
        parts = [f"{self._all}_{name}" for name in (*self.parts, *self.subjects)]
        return {
            **dict.fromkeys(names, mean),
            **dict.fromkeys(parts, aggregations.share),
            "extracted": aggregations.found,
            "how": aggregations.marked,
        }

    def higher_is_better(self) -> dict[str, bool]:
        """True for all but `timeouts`."""
        return {name: name != "timeouts" for name in self.aggregation()}
