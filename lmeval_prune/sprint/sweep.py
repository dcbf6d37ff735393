"""Sweep tasks: answer their questions with the unpruned model and under each head of some layers (SPRINT §3.1).

A sweep is lm-eval's own evaluation of the task. `repeats` is the size of the pool, and try i of a question is the i-th
attempt of the pool.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

from lmeval_prune.architectures import Head, ModelMap
from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError
from lmeval_prune.models import generation
from lmeval_prune.models.attempts import DENSE, attempt_order
from lmeval_prune.models.head_router import FixedOrderRouter
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.models.pruned_server import PrunedServerLM
from lmeval_prune.sprint.options import DEFAULT_LAYERS, SweepOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore, Question
from lmeval_prune.sprint.swept_task import SweptTask, configure, swept
from lmeval_prune.tasks.compat import LoadedTasks
from lmeval_prune.tasks.loading import code_digest, load_tasks, task_manager
from lmeval_prune.tasks.splits import scored_splits, split_names, unnamed_exemplar_split

logger = logging.getLogger(__name__)
Model = PrunedHFLM | PrunedServerLM


class SweepPool(FixedOrderRouter):
    """The unpruned model, and heads that are pruned one at a time."""

    def __init__(self, heads: str) -> None:
        super().__init__()
        self.heads = heads

    def fit_to(self, model_map: ModelMap, weights: str | None, interventions: list[Any]) -> None:
        """Look the heads up in the model; see the base class."""
        self.pool = attempt_order([DENSE, *map(str, Head.parse(self.heads, model_map))])
        super().fit_to(model_map, weights, interventions)


class Sweep:
    """A sweep of tasks over a pool of attempts.

    Args:
        options: questions, pool and settings.
    """

    def __init__(self, options: SweepOptions) -> None:
        self.options = options
        self.store = OutcomeStore(options.output)
        self.scored_splits: dict[str, list[str]] = {}  # by task

    def run(self) -> Outcomes | None:
        """Generate and score the missing answers, and return the outcomes (None on ranks other than 0)."""
        begin = time.perf_counter()
        tasks = self._load_tasks()
        doc_ids = self._draw(tasks)
        tasks = {name: tasks[name] for name in doc_ids}
        if self.store.store_file.exists():
            self.store.check()  # refuse a damaged store before the model is loaded
        layers = DEFAULT_LAYERS if self.options.layers is None else self.options.layers
        pool = SweepPool(self.options.heads or "+".join(f"L{layer}H*" for layer in layers))
        lm = self._load_model(pool)
        try:
            prompting = {
                "system_instruction": self.options.system_instruction,
                "apply_chat_template": self.options.apply_chat_template,
                "fewshot_as_multiturn": self.options.apply_chat_template,  # as lm_eval's command line does
            }
            self._build_requests(tasks, doc_ids, lm, len(pool.pool), prompting)
            self._prepare_store(tasks, lm, pool)
            results = lm_eval.simple_evaluate(
                model=lm,
                tasks=list(tasks),
                num_fewshot=self.options.num_fewshot,
                gen_kwargs=self.options.gen_kwargs or None,
                samples=doc_ids,
                bootstrap_iters=0,
                task_manager=LoadedTasks(tasks),
                **prompting,
            )
            if lm.rank:
                lm.close()  # this rank has written all its answers
            lm.any_rank(False)  # wait for the other ranks
            if lm.rank or results is None:
                return None
            self.store.add(_cells(tasks, results["samples"]))
            assert lm.answering.store
            lm.answering.store.compact()  # before another run is allowed to write
        finally:
            lm.close()
        logger.info("%.1f seconds", time.perf_counter() - begin)
        return self.store.read()

    def _load_tasks(self) -> dict[str, SweptTask]:
        options, metadata = self.options, dict(self.options.metadata)
        if options.split:
            metadata["data_split"] = options.split
        tasks = load_tasks(task_manager(metadata), options.tasks)
        for name, task in tasks.items():
            settings = {**(task.get_config("generation_kwargs") or {}), **options.gen_kwargs}
            if task.get_config("output_type") != "generate_until" or (task.get_config("repeats") or 1) > 1:
                raise InputError(f"task {name} is not swept: a sweep needs a generative task without repeats")
            if generation.is_sampling(settings):
                raise InputError(
                    f"task {name} samples; a sweep is greedy: add do_sample=false,temperature=0 to gen_kwargs"
                )
            self.scored_splits[name] = scored_splits(task)  # before another one is chosen
            self._choose_split(name, task)
        swept_tasks = {}
        for name, task in sorted(tasks.items()):
            swept_tasks[name] = swept(task, options.metric, options.question_field, options.split)
        return swept_tasks

    def _choose_split(self, name: str, task: Task) -> None:
        split = self.options.split
        if not split:
            return
        shots = self.options.num_fewshot
        shots = task.get_config("num_fewshot") if shots is None else shots
        if "prune_data" in (task.get_config("dataset_kwargs") or {}):  # this package's tasks have read data_split
            if shots and task.get_config("fewshot_split") in split_names(split):
                raise InputError(f"task {name} takes its exemplars from {split}; use another split, or no exemplars")
        else:
            if shots and unnamed_exemplar_split(task) == split:
                raise InputError(
                    f"task {name} takes its exemplars from {split}, and lm-eval leaves a question out of its own "
                    f"exemplars only if the task's file names their split: write `fewshot_split: {split}` in it, or "
                    f"use another split, or no exemplars"
                )
            task.set_config(key="test_split", value=split)

    def _draw(self, tasks: dict[str, SweptTask]) -> dict[str, list[int]]:
        """Draw the document indices of each task by the seed, from all tasks together."""
        limit = self.options.limit
        documents = [(name, doc_id) for name, task in tasks.items() for doc_id in range(len(task.eval_docs))]
        if limit is not None:
            random.Random(self.options.seed).shuffle(documents)
            if limit > len(documents):
                logger.warning("the tasks have %d questions, fewer than limit=%d", len(documents), limit)
        drawn: dict[str, list[int]] = defaultdict(list)
        for name, doc_id in sorted(documents[:limit]):
            drawn[name].append(doc_id)
        return dict(drawn)

    def _load_model(self, pool: SweepPool) -> Model:
        arguments = self.options.model_args
        for name in ("responses", "router"):
            if name in arguments:
                raise InputError(f"a sweep does not take the model argument {name}")
        arguments = {**arguments, "responses": self.options.output, "router": pool}
        if self.options.server:
            return PrunedServerLM(self.options.server, **arguments)
        # deterministic: a resumed run decides near-ties as an uninterrupted run does
        return PrunedHFLM(**{"deterministic": True, **arguments})

    def _build_requests(
        self,
        tasks: dict[str, SweptTask],
        doc_ids: dict[str, list[int]],
        lm: Model,
        repeats: int,
        prompting: dict[str, Any],
    ) -> None:
        """Build the requests as the evaluation would: the store needs the digests of their prompts."""
        chat = self.options.apply_chat_template
        random.seed(DEFAULT_RANDOM_SEED)  # as the evaluation does, so that a resumed run has the same prompts
        np.random.seed(DEFAULT_OTHER_SEED)
        for name, task in tasks.items():
            configure(task, repeats, self.options.num_fewshot, self.options.gen_kwargs)
            task.build_all_requests(
                samples=doc_ids[name],
                rank=lm.rank,
                world_size=lm.world_size,
                chat_template=lm.apply_chat_template if chat else None,
                tokenizer_name=lm.tokenizer_name if chat else "",
                **prompting,
            )

    def _prepare_store(self, tasks: dict[str, SweptTask], lm: Model, pool: SweepPool) -> None:
        """Prepare the store on rank 0; if this fails, all ranks end instead of waiting for it."""
        failed = True
        try:
            if lm.rank == 0:
                settings = {name: self._settings(name, task, lm) for name, task in tasks.items()}
                self.store.begin(_identity(lm), settings, _questions(tasks), pool.pool)
            failed = False
        finally:
            failed_anywhere = lm.any_rank(failed)
        if failed_anywhere:
            raise InputError("the first process could not prepare the store; its message has the reason")

    def _settings(self, name: str, task: SweptTask, lm: Model) -> dict[str, Any]:
        """Return all settings of a task that outcomes depend on, as JSON."""
        template = lm.chat_template(True) if self.options.apply_chat_template else ""
        code = code_digest(task, dict(vars(task.config)), own=False)
        function = task.get_config("process_results")
        return {
            "generation": json.loads(json.dumps(task.get_config("generation_kwargs"), default=str)),
            "num_fewshot": task.get_config("num_fewshot"),
            "chat_template": digest(template) if template else "",
            "system_instruction": self.options.system_instruction or "",
            "metric": f"{task.metric},{task.filter}",
            "question_field": task.question_field,
            "version": str((task.get_config("metadata") or {}).get("version", "")),
            "scoring": f"{function.__module__}:{function.__qualname__}" if callable(function) else "",
            "scored_splits": self.scored_splits[name],
            **({"code": code} if code else {}),
        }


def _questions(tasks: dict[str, SweptTask]) -> list[dict[str, Any]]:
    rows = []
    for name, task in tasks.items():
        for doc_id, prompt in sorted(task.prompts.items()):
            doc = task.eval_docs[doc_id]
            row = Question(name, task.split, doc_id)._asdict()
            row |= {"question": str(doc[task.question_field]), "prompt": prompt}
            rows.append({**row, "attributes": _attributes(doc, task.question_field)})
    return rows


def _cells(tasks: dict[str, SweptTask], samples: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    cells = []
    for name, rows in samples.items():
        for row in rows:
            question = Question(name, tasks[name].split, row["doc_id"])._asdict()
            (_, answers) = row["arguments"][0]
            columns = {
                "attempt": answers["attempts"],
                "answer": answers["answers"],
                "length": answers["lengths"],
                "cut_off": answers["cut_off"],
                "outcome": row["outcomes"],
                "extracted": row["extracted"],
            }
            tries = zip(*columns.values(), strict=True)
            cells += [{**question, **dict(zip(columns, values, strict=True))} for values in tries]
    return cells


def _identity(lm: Model) -> dict[str, Any]:
    name = str(getattr(lm.config, "_name_or_path", ""))
    identity = {"name": Path(name).name or name, **lm.identity, "interventions": lm.answering.interventions()}
    identity |= {"versions": lm.answering.versions}
    return {**json.loads(json.dumps(identity)), **lm.outcome_identity}


def _attributes(doc: dict[str, Any], question_field: str) -> dict[str, Any]:
    """Return the short fields of a document that reports can group by, e.g. subject, level or grade."""
    hidden = {question_field, "target", "answer", "id", "unique_id", "doc_id"}
    return {
        name: value
        for name, value in doc.items()
        if name not in hidden and (isinstance(value, bool | int) or (isinstance(value, str) and len(value) <= 64))
    }
