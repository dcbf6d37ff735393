"""pass@k, maj@N and the number of distinct answers for tasks with `repeats: N`.

```yaml
include: [prune_gsm8k.yaml, ../_pass] # to change only N: include: prune_gsm8k_pass8.yaml
task: prune_gsm8k_pass8
repeats: 8
```
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.metrics import mean

from lmeval_prune.errors import print_input_errors
from lmeval_prune.scoring.passes import attempts, majority, pass_ordered, pass_unbiased
from lmeval_prune.tasks.results import EQUALITIES, Scores, same_text
from lmeval_prune.tasks.scored import ScoredTask


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
        count = self.attempts = int(config["repeats"])
        self.main = f"pass@{count}"
        self.prefix = f"{self.main}_"  # followed by the name of a subset
        # Keep N responses. With several processes lm-eval may append copies, so that all processes have equally many.
        pipelines = config.get("filter_list")
        filters = [step for step in pipelines[0]["filter"] if step["function"] != "take_first"] if pipelines else []
        keep = {"function": "take_first_k", "k": count}
        config["filter_list"] = [{"name": "none", "filter": [keep, *filters]}]
        super().__init__(config)

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
        scored = [self.score(doc, [text]) for text in responses]
        correct = [bool(score["exact_match"]) for score in scored]
        return {
            **{f"pass@{k}": float(pass_ordered(correct, k)) for k in self.ks},
            **{f"pass@{k}_unbiased": pass_unbiased(len(correct), sum(correct), k) for k in self.ks},
            **(self._votes(correct, [score["extracted"] for score in scored]) if "extracted" in scored[0] else {}),
            **({"how": [score["how"] for score in scored]} if "how" in scored[0] else {}),
            **{name: mean([score[name] for score in scored]) for name in self._shares if name in scored[0]},
        }

    def _votes(self, correct: list[bool], answers: list[str]) -> Scores:
        """Return the metrics of extracted answers, which a function that is not of this package may not give."""
        winner, distinct = majority(answers, EQUALITIES.get(self.score, same_text))
        right = float(winner is not None and correct[winner])
        return {f"maj@{self.attempts}": right, "distinct": float(distinct), "extracted": answers}
