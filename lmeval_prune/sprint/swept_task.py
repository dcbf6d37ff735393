"""Tasks of lm-eval whose questions are answered several times, with a score for each try."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.defaults import DEFAULT_OTHER_SEED

from lmeval_prune.artefacts import digest
from lmeval_prune.tasks import compat, tries


class SweptTask(ConfigurableTask):
    """A task whose documents are answered `repeats` times; `swept` mixes this class into the task's own class.

    Filter and metric are applied to each response alone, so the outcomes are those of the task without repeats.

    Attributes:
        metric: metric of an outcome, 0 or 1.
        filter: name of the filter whose results are scored.
        question_field: document field with the question.
        split: name of the evaluated split.
        prompts: digest of the prompt of each document, over all processes, by the document's index.
    """

    metric: str
    filter: str
    question_field: str
    split: str
    prompts: dict[int, str]
    _instances: list[Instance] | None

    def build_all_requests(
        self, *, samples: list[int] | None = None, rank: int = 0, world_size: int = 1, **options: Any
    ) -> None:
        """Build the requests once, with the prompts of a run over all documents in a single process.

        lm-eval draws exemplars document by document, so few-shot prompts are built for all documents and then filtered.
        lm-eval numbers the documents of `samples` anew.
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
        """Apply the filter to each response as if it were its document's only response."""
        singles: list[Instance] = []
        for instance in self.instances:
            texts = instance.resps[: instance.repeats]  # excludes the copies that pad ranks
            singles += [replace(instance, resps=[text], filtered_resps={}) for text in texts]
        filtered = iter(tries.filtered(self, singles))
        for instance in self.instances:
            texts = instance.resps[: instance.repeats]
            instance.filtered_resps = {self.filter: [next(filtered) for _ in texts]}
        return None

    def process_results(self, doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """Score each try: whether it is right, and its extracted answer (empty if the task does not report it)."""
        return self.score_tries(doc, results[0])

    def score_tries(self, doc: dict[str, Any], responses: Sequence[Any]) -> dict[str, Any]:
        """Score filtered responses; `InputError` if the metric is not 0 or 1."""
        outcomes, extracted = [], []
        for response in responses:
            scores = super().process_results(doc, [response])
            outcomes.append(tries.is_right(self, scores, self.metric))
            extracted.append(str(scores.get("extracted", "")))
        return {"outcomes": outcomes, "extracted": extracted}

    def aggregation(self) -> dict[str, Callable[..., Any]]:
        """Return the accuracy over all tries, and the number of extracted answers."""
        return {"outcomes": lambda rows: sum(map(sum, rows)) / sum(map(len, rows)), "extracted": len}

    def higher_is_better(self) -> dict[str, bool]:
        """Return that higher is better."""
        return {"outcomes": True, "extracted": True}


def swept(
    task: Task, metric: str | None = None, question_field: str | None = None, split: str | None = None
) -> SweptTask:
    """Turn a loaded generative task into a swept task, in place.

    Args:
        task: the loaded task.
        metric: `METRIC` or `METRIC,FILTER`; default: `exact_match` or the task's first metric, with its first filter.
        question_field: document field with the question; default: the task's metadata, else `question`.
        split: name of the evaluated split; default: the task's own.
    """
    metric_name, filter_name = tries.choose_metric(task, metric)
    kind = type(task)
    result: Any = task
    result.__class__ = type(f"Swept{kind.__name__}", (SweptTask, kind), {})
    result.metric, result.filter = metric_name, filter_name
    declared = (task.get_config("metadata") or {}).get("question_field")
    result.question_field = str(question_field or declared or "question")
    result.split = split or str(task.get_config("test_split") or task.get_config("validation_split"))
    result.prompts = {}
    # score an empty answer, so that a wrong metric is refused before the model generates anything
    doc = result.eval_docs[0]
    empty = compat.request("generate_until", ("", {}), result.task_name, 0, doc=doc, resps=[""])
    result.score_tries(doc, tries.filtered(result, [empty]))
    return result


def configure(task: SweptTask, repeats: int, num_fewshot: int | None, gen_kwargs: Mapping[str, Any]) -> None:
    """Set the options that lm-eval's evaluation would set, so that requests can be built before it."""
    task.set_config("repeats", repeats)
    if gen_kwargs:
        task.set_config("generation_kwargs", dict(gen_kwargs), update=True)
    declared = task.get_config("num_fewshot")
    if declared != 0:  # a task with 0 keeps it
        task.set_config("num_fewshot", (declared or 0) if num_fewshot is None else num_fewshot)
    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
