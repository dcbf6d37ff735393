"""pass@k, maj@N and the number of distinct answers for tasks with `repeats: N`.

```yaml
include: [prune_gsm8k.yaml, ../_pass] # to change only N: include: prune_gsm8k_pass8.yaml
task: prune_gsm8k_pass8
repeats: 8
```
"""

from __future__ import annotations

import logging
from typing import Any

from lm_eval.api.metrics import mean

from lmeval_prune.errors import InputError, first_line, print_input_errors
from lmeval_prune.scoring.passes import attempts, majority, pass_ordered, pass_unbiased
from lmeval_prune.tasks.results import EQUALITIES, Scores, same_text
from lmeval_prune.tasks.scored import ScoredTask

logger = logging.getLogger(__name__)


class PassAtTask(ScoredTask):
    """A generative task with N responses per document.

    Metrics for k = 1, 2, 4, …, N: `pass@k` (one of the *first* k responses is correct; for the ordered responses of a
    routed run) and `pass@k_unbiased` (1 − C(n−c, k)/C(n, k) for c correct of n
    responses; for random samples). Further metrics: `maj@N`; `distinct`, the number of different answers;
    the shares `strict_match` and `unmarked`; and `pass@N_SUBSET` for each subset of the documents (`level_1`,
    `algebra`, …). With k = N both estimators are equal.
    """

    @print_input_errors
    def __init__(self, config: dict[str, Any]) -> None:
        config = dict(config)
        config["generation_kwargs"] = {**(config.get("generation_kwargs") or {}), **config.pop("sampling", {})}
        count = config.get("repeats")
        if not isinstance(count, int) or count < 1:
            raise InputError(f"task {config.get('task')}: repeats must be a whole number above 0, not {count!r}")
        self.attempts = count
        self._extracts = set[bool]()  # whether answers so far have `extracted`
        self.main = f"pass@{count}"
        self.prefix = f"{self.main}_"  # followed by the name of a subset
        # Keep N responses. With several processes lm-eval may append copies, so that all processes have equally many.
        pipelines = config.get("filter_list")
        filters = [step for step in pipelines[0]["filter"] if step["function"] != "take_first"] if pipelines else []
        keep = {"function": "take_first_k", "k": count}
        config["filter_list"] = [{"name": "none", "filter": [keep, *filters]}]
        super().__init__(config)

    @print_input_errors
    def build_all_requests(self, **options: Any) -> None:
        """Build the requests of a function that can score their answers; see `Task.build_all_requests`."""
        self.check_score()
        super().build_all_requests(**options)

    def check_score(self) -> None:
        """Score an empty answer, before a model generates anything; warn of a function that fails at it."""
        if self.score in EQUALITIES or not callable(self.config.process_results):  # lm_eval --predict_only
            return
        document = next(iter(self.eval_docs), None)
        if document is None:
            return
        try:
            score = self.score(document, [""])
        except Exception as error:  # functions of users raise errors of any type
            logger.warning(
                "task %s: its process_results fails at an empty answer, which would end an evaluation (%s)",
                *(self.config.task, first_line(error)),
            )
        else:
            self._check(score)

    def _check(self, score: Scores) -> None:
        """Refuse a score without `exact_match`."""
        if "exact_match" not in score:
            raise InputError(
                f"task {self.config.task}: its process_results gives no exact_match, of which pass@k is computed; "
                f"return it, 0 or 1"
            )

    @property
    def ks(self) -> list[int]:
        """Values of k for which pass@k is reported."""
        return attempts(self.attempts)

    @property
    def means(self) -> list[str]:
        """Names of the metrics that are averaged over the documents."""
        passes = [f"pass@{k}{end}" for k in self.ks for end in ("", "_unbiased")]
        return [*passes, f"maj@{self.attempts}", "distinct", *self._shares]

    @print_input_errors
    def scores(self, doc: dict[str, Any], response: Any) -> Scores:
        """Score each of the N responses, and return the metrics of all of them together."""
        responses = list(response)[: self.attempts]
        if len(responses) < self.attempts:
            needed = f"task {self.config.task}: {self.main} needs {self.attempts} responses to a question"
            raise InputError(f"{needed}, got {len(responses)}")
        scored = [self.score(doc, [text]) for text in responses]
        for score in scored:
            self._check(score)
        extracts = {"extracted" in score for score in scored} | self._extracts
        self._extracts = extracts
        if len(extracts) > 1:
            raise InputError(
                f"task {self.config.task}: its process_results gives extracted, of which maj@{self.attempts} is "
                f"computed, for some answers alone; return it for all, empty where nothing is found"
            )
        correct = [bool(score["exact_match"]) for score in scored]
        return {
            **{f"pass@{k}": float(pass_ordered(correct, k)) for k in self.ks},
            **{f"pass@{k}_unbiased": pass_unbiased(len(correct), sum(correct), k) for k in self.ks},
            **(self._votes(correct, [score["extracted"] for score in scored]) if extracts == {True} else {}),
            **({"how": [score["how"] for score in scored]} if "how" in scored[0] else {}),
            **{name: mean([score[name] for score in scored]) for name in self._shares if name in scored[0]},
        }

    def _votes(self, correct: list[bool], answers: list[str]) -> Scores:
        """Return the metrics of extracted answers, which a function that is not of this package may not give."""
        winner, distinct = majority(answers, EQUALITIES.get(self.score, same_text))
        right = float(winner is not None and correct[winner])
        return {f"maj@{self.attempts}": right, "distinct": float(distinct), "extracted": answers}
