"""A task of lm-eval's, asked M times, each try scored by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError


class SweptTask(ConfigurableTask):
    """Mixed into a task's own class by `swept`.

    Its document is asked `repeats` times; its own filter and metric are applied to each of the responses alone, so
    that their outcomes are those of the task asked once.

    Attributes:
        metric: which decides the outcome; 0 or 1.
        filter: name of the filter whose results count.
        prompts: of each document that is asked on any process, by its number, the digest of its prompt.
    """

    metric: str
    filter: str
    prompts: dict[int, str]
    _instances: list[Instance] | None

    def build_all_requests(
        self, *, samples: list[int] | None = None, rank: int = 0, world_size: int = 1, **options: Any
    ) -> None:
        """As lm-eval's, with the prompts that a run over all documents on one process would have.

        Exemplars are drawn document by document: with few-shot, all prompts are made, and those of the documents that
        are asked are kept.
        """
        asked = samples or list(range(len(self.eval_docs)))
        few_shot = bool(self.get_config("num_fewshot"))
        super().build_all_requests(samples=None if few_shot else asked, **options)
        place_of = {number: place for place, number in enumerate(asked)}
        self.prompts, instances = {}, []
        for instance in self._instances or []:
            place = place_of.get(instance.doc_id) if few_shot else instance.doc_id
            if place is not None:
                self.prompts[asked[place]] = digest(instance.args[0])
                if place % world_size == rank:
                    instances.append(replace(instance, metadata=(instance.task_name, place, instance.repeats)))
        self._instances = instances

    def apply_filters(self) -> list[Instance] | None:
        """Apply the filter to all responses at once, each as if it were its document's only one."""
        singles: list[Instance] = []
        for instance in self.instances:
            tries = instance.resps[: instance.repeats]  # without the copies that fill up ranks
            singles += [replace(instance, resps=[text], filtered_resps={}) for text in tries]
        found = iter(self._filtered(singles))
        for instance in self.instances:
            tries = instance.resps[: instance.repeats]
            instance.filtered_resps = {self.filter: [next(found) for _ in tries]}
        return None

    def process_results(self, doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """Of each try, whether it is right, and what was extracted from it (empty if the task does not say).

        Raises:
            InputError: the metric is not there, or is not 0 or 1.
        """
        outcomes, extracted = [], []
        for response in results[0]:
            scores = super().process_results(doc, [response])
            if self.metric not in scores or float(scores[self.metric]) not in (0.0, 1.0):
                has = ", ".join(f"{k}={v}" for k, v in scores.items() if isinstance(v, int | float))
                raise InputError(
                    f"task {self.task_name}: {self.metric} is not a metric that is 0 or 1; it has {has}: use --metric"
                )
            outcomes.append(bool(scores[self.metric]))
            extracted.append(str(scores.get("extracted", "")))
        return {"outcomes": outcomes, "extracted": extracted}

    def aggregation(self) -> dict[str, Callable[..., Any]]:
        """The share of right tries; of extracted answers the number."""
        return {"outcomes": lambda rows: sum(map(sum, rows)) / sum(map(len, rows)), "extracted": len}

    def higher_is_better(self) -> dict[str, bool]:
        """Right tries are better."""
        return {"outcomes": True, "extracted": True}

    def check(self) -> None:
        """Score an empty answer, so that a wrong metric is found before anything is generated."""
        doc = self.eval_docs[0]
        instance = Instance("generate_until", doc, ("", {}), 0, metadata=(self.task_name, 0, 1), resps=[""])
        self.process_results(doc, [self._filtered([instance])])

    def _filtered(self, singles: list[Instance]) -> list[Any]:
        """What the filter makes of instances with one response each."""
        for ensemble in self._filters:
            if ensemble.name == self.filter:
                ensemble.apply(singles)
        return [single.filtered_resps[self.filter] for single in singles]


def swept(task: ConfigurableTask, metric: str | None) -> SweptTask:
    """A loaded task as one that can be swept.

    Args:
        task: generative; it is changed.
        metric: `METRIC` or `METRIC,FILTER`; default `exact_match` or the task's first, under its first filter.

    Raises:
        InputError: the task has no such filter or metric.
    """
    filters = [ensemble.name for ensemble in task._filters]
    names = [found["metric"] for found in task.get_config("metric_list") or []]
    wanted, _, chosen = (metric or "").partition(",")
    if chosen and chosen not in filters:
        raise InputError(f"task {task.task_name} has no filter {chosen!r}; it has {', '.join(filters)}")
    kind = type(task)
    found: Any = task
    found.__class__ = type(f"Swept{kind.__name__}", (SweptTask, kind), {})
    found.metric = wanted or ("exact_match" if "exact_match" in names or not names else names[0])
    found.filter = chosen or filters[0]
    found.check()
    checked: SweptTask = found
    return checked
