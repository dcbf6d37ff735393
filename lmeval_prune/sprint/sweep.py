"""Sweep tasks: answer their questions with the unpruned model and under each head of some layers (SPRINT §3.1).

A sweep is lm-eval's own evaluation of the task. `repeats` is the size of the pool, and try i of a question is the i-th
attempt of the pool.
"""

from __future__ import annotations

import json
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

from lmeval_prune.architectures import Head, ModelMap
from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError
from lmeval_prune.models import generation
from lmeval_prune.models.head_router import DENSE, HeadRouter, attempt_order
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.models.pruned_server import PrunedServerLM
from lmeval_prune.sprint.options import DEFAULT_LAYERS, SweepOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore
from lmeval_prune.tasks import compat, tries
from lmeval_prune.tasks.loading import code_digest, load_tasks, task_manager
from lmeval_prune.tasks.splits import scored_splits, split_names, unnamed_exemplar_split

logger = logging.getLogger(__name__)


class SweepPool(HeadRouter):
    """The unpruned model, and heads that are pruned one at a time: attempt i of each question has entry i."""

    needs_weights = False
    pool: Sequence[str] = ()

    def __init__(self, heads: str) -> None:
        self.heads = heads

    def fit_to(self, model_map: ModelMap, weights: str | None, interventions: list[Any]) -> None:
        self.pool = attempt_order([DENSE, *map(str, Head.parse(self.heads, model_map))])

    def order(self, request: Any) -> Sequence[str]:
        return self.pool

    @property
    def info(self) -> dict[str, Any]:
        return {"source": "in turn", "pool": list(self.pool)}


class SweptTask(ConfigurableTask):
    """A task whose documents are answered `repeats` times; `swept` mixes this class into the task's own class.

    Filter and metric are applied to each response alone, so the outcomes are those of the task without repeats.
    """

    metric: str  # of an outcome, 0 or 1
    filter: str  # whose results are scored
    question_field: str
    split: str  # that is evaluated
    scored_splits: list[str]  # of the task itself
    prompts: dict[int, str]  # digest of the prompt of each document, over all processes, by the document's index
    _instances: list[Instance] | None

    def build_all_requests(
        self, *, samples: list[int] | None = None, rank: int = 0, world_size: int = 1, **options: Any
    ) -> None:
        """Build the requests once, with the prompts of a run over all documents in a single process.

        lm-eval draws few-shot examples document by document, so prompts are built for all documents and then
        filtered. lm-eval numbers the documents of `samples` anew.
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
        texts_of = [instance.resps[: instance.repeats] for instance in self.instances]  # without copies that pad ranks
        singles = [
            replace(instance, resps=[text], filtered_resps={})
            for instance, texts in zip(self.instances, texts_of, strict=True)
            for text in texts
        ]
        filtered = iter(tries.filtered(self, singles))
        for instance, texts in zip(self.instances, texts_of, strict=True):
            instance.filtered_resps = {self.filter: [next(filtered) for _ in texts]}
        return None

    def process_results(self, doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """Score each try: whether it is right, and its extracted answer (empty if the task does not report it)."""
        scores = [super(SweptTask, self).process_results(doc, [response]) for response in results[0]]
        outcomes = [tries.is_right(self, score, self.metric) for score in scores]
        return {"outcomes": outcomes, "extracted": [str(score.get("extracted", "")) for score in scores]}

    def aggregation(self) -> dict[str, Callable[..., Any]]:
        return {"outcomes": lambda rows: sum(map(sum, rows)) / sum(map(len, rows)), "extracted": len}

    def higher_is_better(self) -> dict[str, bool]:
        return {"outcomes": True, "extracted": True}


def swept(task: Task, options: SweepOptions) -> SweptTask:
    """Turn a loaded task into a swept task, in place; `InputError` if its outcomes would mean something else."""
    name, split = task.config.task, options.split
    settings = {**(task.get_config("generation_kwargs") or {}), **options.gen_kwargs}
    if task.get_config("output_type") != "generate_until" or (task.get_config("repeats") or 1) > 1:
        raise InputError(f"task {name} is not swept: a sweep needs a generative task without repeats")
    if generation.is_sampling(settings):
        raise InputError(f"task {name} samples; a sweep is greedy: add do_sample=false,temperature=0 to gen_kwargs")
    scored = scored_splits(task)  # before another split is chosen
    if split:
        shots = task.get_config("num_fewshot") if options.num_fewshot is None else options.num_fewshot
        is_own = "prune_data" in (task.get_config("dataset_kwargs") or {})  # such a task has read data_split
        if is_own and shots and task.get_config("fewshot_split") in split_names(split):
            raise InputError(f"task {name} takes its few-shot examples from {split}; use another split, or none")
        if not is_own and shots and unnamed_exemplar_split(task) == split:
            raise InputError(
                f"task {name} draws few-shot examples from {split}, where a question may be one; write `fewshot_split: "
                f"{split}` in its file, or use another split, or no examples"
            )
        if not is_own:
            task.set_config(key="test_split", value=split)
    metric, filter_name = tries.choose_metric(task, options.metric)
    result: Any = task
    kind: Any = type(task)
    result.__class__ = type(f"Swept{kind.__name__}", (SweptTask, kind), {})
    result.metric, result.filter, result.scored_splits, result.prompts = metric, filter_name, scored, {}
    declared = (task.get_config("metadata") or {}).get("question_field")
    result.question_field = str(options.question_field or declared or "question")
    result.split = split or str(task.get_config("test_split") or task.get_config("validation_split"))
    # score an empty answer, so that a wrong metric is refused before the model generates anything
    doc = result.eval_docs[0]
    empty = compat.request("generate_until", ("", {}), result.task_name, 0, doc=doc, resps=[""])
    result.process_results(doc, [tries.filtered(result, [empty])])
    return result


def run_sweep(options: SweepOptions) -> Outcomes | None:
    """Generate and score the missing answers, and return the outcomes (None on ranks other than 0)."""
    store = OutcomeStore(options.output)
    metadata = {**options.metadata, **({"data_split": options.split} if options.split else {})}
    loaded = load_tasks(task_manager(metadata), options.tasks)
    tasks = {name: swept(task, options) for name, task in sorted(loaded.items())}

    documents = [(name, doc_id) for name, task in tasks.items() for doc_id in range(len(task.eval_docs))]
    if options.limit is not None:
        random.Random(options.seed).shuffle(documents)  # of all tasks together
    doc_ids: dict[str, list[int]] = defaultdict(list)
    for name, doc_id in sorted(documents[: options.limit]):
        doc_ids[name].append(doc_id)
    tasks = {name: tasks[name] for name in doc_ids}

    layers = DEFAULT_LAYERS if options.layers is None else options.layers
    pool = SweepPool(options.heads or "+".join(f"L{layer}H*" for layer in layers))
    arguments = {**options.model_args, "responses": options.output, "router": pool}
    lm: PrunedHFLM | PrunedServerLM
    if options.server:
        lm = PrunedServerLM(options.server, **arguments)
    else:  # deterministic: a resumed run decides near-ties as an uninterrupted run does
        lm = PrunedHFLM(**{"deterministic": True, **arguments})
    try:
        chat = options.apply_chat_template
        prompting: dict[str, Any] = {
            "system_instruction": options.system_instruction,
            "apply_chat_template": chat,
            "fewshot_as_multiturn": chat,  # as lm_eval's command line does
        }
        # The requests are built as the evaluation would: the store needs the digests of their prompts
        random.seed(DEFAULT_RANDOM_SEED)  # so that a resumed run has the same prompts
        np.random.seed(DEFAULT_OTHER_SEED)
        for name, task in tasks.items():
            task.set_config("repeats", len(pool.pool))
            if options.gen_kwargs:
                task.set_config("generation_kwargs", dict(options.gen_kwargs), update=True)
            declared = task.get_config("num_fewshot")
            if declared != 0:  # a task with 0 keeps it
                shots = options.num_fewshot
                task.set_config("num_fewshot", (declared or 0) if shots is None else shots)
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
            task.build_all_requests(
                samples=doc_ids[name],
                rank=lm.rank,
                world_size=lm.world_size,
                chat_template=lm.apply_chat_template if chat else None,
                tokenizer_name=lm.tokenizer_name if chat else "",
                **prompting,
            )
        failed = True
        try:
            if lm.rank == 0:
                template = str(lm.chat_template(True)) if chat else ""
                settings = {name: _settings(task, options, template) for name, task in tasks.items()}
                name = Path(str(getattr(lm.config, "_name_or_path", ""))).name
                model = {"name": name, **lm.identity, "interventions": lm.intervention_identities()}
                model = json.loads(json.dumps(model | {"versions": lm.versions})) | lm.outcome_identity
                store.begin(model, settings, _questions(tasks), pool.pool)
            failed = False
        finally:
            failed_anywhere = lm.any_rank(failed)
        if failed_anywhere:  # no rank waits for one that has ended
            raise InputError("the first process could not prepare the store; its message has the reason")
        results = lm_eval.simple_evaluate(
            model=lm,
            tasks=list(tasks),
            num_fewshot=options.num_fewshot,
            gen_kwargs=options.gen_kwargs or None,
            samples=dict(doc_ids),
            bootstrap_iters=0,
            task_manager=compat.LoadedTasks(tasks),
            **prompting,
        )
        if lm.rank:
            lm.close()  # this rank has written all its answers
        lm.any_rank(False)  # wait for the other ranks
        if lm.rank or results is None:
            return None
        store.add(_cells(tasks, results["samples"]))
        assert lm.store
        lm.store.compact()  # before another run is allowed to write
    finally:
        lm.close()
    return store.read()


def _settings(task: SweptTask, options: SweepOptions, template: str) -> dict[str, Any]:
    """Return all settings of a task that outcomes depend on, as JSON."""
    code = code_digest(task, dict(vars(task.config)), own=False)
    function = task.get_config("process_results")
    scoring = f"{function.__module__}:{function.__qualname__}" if callable(function) else ""
    return {
        "generation": json.loads(json.dumps(task.get_config("generation_kwargs"), default=str)),
        "num_fewshot": task.get_config("num_fewshot"),
        "chat_template": digest(template) if template else "",
        "system_instruction": options.system_instruction or "",
        "metric": f"{task.metric},{task.filter}",
        "question_field": task.question_field,
        "version": str((task.get_config("metadata") or {}).get("version", "")),
        "scoring": scoring.rpartition("/")[2],  # lm-eval names a module by its path, and a folder may be moved
        "scored_splits": task.scored_splits,
        **({"code": code} if code else {}),
    }


def _questions(tasks: dict[str, SweptTask]) -> list[dict[str, Any]]:
    """Return the rows of the questions; their attributes are the short fields that reports can group by."""
    rows = []
    for name, task in tasks.items():
        hidden = {"target", "answer", "id", "unique_id", "doc_id", task.question_field}
        for doc_id, prompt in sorted(task.prompts.items()):
            doc = task.eval_docs[doc_id]
            attributes = {
                field: value
                for field, value in doc.items()
                if field not in hidden and (isinstance(value, int) or (isinstance(value, str) and len(value) <= 64))
            }
            row = {"task": name, "split": task.split, "doc_id": doc_id, "question": str(doc[task.question_field])}
            rows.append({**row, "prompt": prompt, "attributes": attributes})
    return rows


def _cells(tasks: dict[str, SweptTask], samples: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    cells = []
    names = ("attempt", "answer", "length", "cut_off", "outcome", "extracted")
    for name, rows in samples.items():
        for row in rows:
            answers = row["arguments"][0][1]
            columns = [answers[each] for each in ("attempts", "answers", "lengths", "cut_off")]
            question = {"task": name, "split": tasks[name].split, "doc_id": row["doc_id"]}
            for values in zip(*columns, row["outcomes"], row["extracted"], strict=True):
                cells.append({**question, **dict(zip(names, values, strict=True))})
    return cells
