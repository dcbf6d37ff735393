"""Tasks of lm-eval that are asked M times, each try scored by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.defaults import DEFAULT_OTHER_SEED

from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError


class SweptTask(ConfigurableTask):
    """A task whose documents are asked `repeats` times; `swept` mixes it into the task's own class.

    Its filter and metric are applied to each response alone, so the outcomes are those of the task asked once.

    Attributes:
        metric: decides the outcome; 0 or 1.
        filter: name of the filter whose results count.
        prompts: digest of the prompt of each document that is asked on any process, by the document's number.
    """

    metric: str
    filter: str
    prompts: dict[int, str]
    _instances: list[Instance] | None

    def build_all_requests(
        self, *, samples: list[int] | None = None, rank: int = 0, world_size: int = 1, **options: Any
    ) -> None:
        """Build the requests once, with the prompts that a run over all documents on one process would have.

        Exemplars are drawn document by document: with few-shot, all prompts are made, and those of the documents that
        are asked are kept.
        """
        if self.prompts:
            return
        doc_ids = samples or list(range(len(self.eval_docs)))
        few_shot = bool(self.get_config("num_fewshot"))
        super().build_all_requests(samples=None if few_shot else doc_ids, **options)
        index_of = {doc_id: index for index, doc_id in enumerate(doc_ids)}
        instances = []
        for instance in self._instances or []:
            index = index_of.get(instance.doc_id) if few_shot else instance.doc_id
            if index is not None:
                self.prompts[doc_ids[index]] = digest(instance.args[0])
                if index % world_size == rank:
                    instances.append(replace(instance, metadata=(instance.task_name, index, instance.repeats)))
        self._instances = instances

    def apply_filters(self) -> list[Instance] | None:
        """Apply the filter to all responses at once, each as if it were its document's only one."""
        singles: list[Instance] = []
        for instance in self.instances:
            tries = instance.resps[: instance.repeats]  # without the copies that fill up ranks
            singles += [replace(instance, resps=[text], filtered_resps={}) for text in tries]
        filtered = iter(self._filtered(singles))
        for instance in self.instances:
            tries = instance.resps[: instance.repeats]
            instance.filtered_resps = {self.filter: [next(filtered) for _ in tries]}
        return None

    def process_results(self, doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """Score each try: whether it is right, and what was extracted from it (empty if the task does not say).

        Raises:
            InputError: the metric is not there, or is not 0 or 1.
        """
        outcomes, extracted = [], []
        for response in results[0]:
            scores = super().process_results(doc, [response])
            if self.metric not in scores or float(scores[self.metric]) not in (0.0, 1.0):
                numbers = ", ".join(f"{k}={v}" for k, v in scores.items() if isinstance(v, int | float))
                raise InputError(
                    f"task {self.task_name}: {self.metric} is not a metric that is 0 or 1; it has {numbers}: "
                    f"use --metric"
                )
            outcomes.append(bool(scores[self.metric]))
            extracted.append(str(scores.get("extracted", "")))
        return {"outcomes": outcomes, "extracted": extracted}

    def aggregation(self) -> dict[str, Callable[..., Any]]:
        """Average right tries, and count extracted answers."""
        return {"outcomes": lambda rows: sum(map(sum, rows)) / sum(map(len, rows)), "extracted": len}

    def higher_is_better(self) -> dict[str, bool]:
        """Return that right tries are better."""
        return {"outcomes": True, "extracted": True}

    def _filtered(self, singles: list[Instance]) -> list[Any]:
        """Filter instances with one response each."""
        for ensemble in self._filters:
            if ensemble.name == self.filter:
                ensemble.apply(singles)
        return [single.filtered_resps[self.filter] for single in singles]


def swept(task: ConfigurableTask, metric: str | None) -> SweptTask:
    """Turn a loaded task into one that can be swept.

    Args:
        task: generative; it is changed.
        metric: `METRIC` or `METRIC,FILTER`; default `exact_match` or the task's first, under its first filter.

    Raises:
        InputError: the task has no such filter or metric.
    """
    filters = [ensemble.name for ensemble in task._filters]
    names = [entry["metric"] for entry in task.get_config("metric_list") or []]
    name, _, filter_name = (metric or "").partition(",")
    if filter_name and filter_name not in filters:
        raise InputError(f"task {task.task_name} has no filter {filter_name!r}; it has {', '.join(filters)}")
    kind = type(task)
    result: Any = task
    result.__class__ = type(f"Swept{kind.__name__}", (SweptTask, kind), {})
    result.metric = name or ("exact_match" if "exact_match" in names or not names else names[0])
    result.filter = filter_name or filters[0]
    result.prompts = {}
    # an empty answer is scored, so that a wrong metric is refused before anything is generated
    doc = result.eval_docs[0]
    empty = Instance("generate_until", doc, ("", {}), 0, metadata=(result.task_name, 0, 1), resps=[""])
    result.process_results(doc, [result._filtered([empty])])
    return result


def configure(task: SweptTask, repeats: int, num_fewshot: int | None, gen_kwargs: Mapping[str, Any]) -> None:
    """Set what lm-eval's evaluation sets later, so that the requests can be built before it."""
    task.set_config("repeats", repeats)
    if gen_kwargs:
        task.set_config("generation_kwargs", dict(gen_kwargs), update=True)
    declared = task.get_config("num_fewshot")
    if declared != 0:  # a task that says 0 takes none
        task.set_config("num_fewshot", (declared or 0) if num_fewshot is None else num_fewshot)
    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
