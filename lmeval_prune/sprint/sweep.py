"""Sweeps: a task's questions under every head of some layers, pruned one at a time (SPRINT §3.1).

A sweep is lm-eval's own evaluation of the task, asked once for every member of the pool, try i under member i.
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
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

from lmeval_prune.architectures import Head, ModelMap
from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError
from lmeval_prune.models import generation
from lmeval_prune.models.head_router import DENSE, FixedOrderRouter
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.models.pruned_server import PrunedServerLM
from lmeval_prune.sprint.options import SweepOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore, Question, pool_order
from lmeval_prune.sprint.swept_task import SweptTask, configure, swept
from lmeval_prune.tasks.loading import load_tasks, task_manager

logger = logging.getLogger(__name__)
Model = PrunedHFLM | PrunedServerLM


class Sweep:
    """A sweep of tasks over the heads of a model.

    Args:
        options: questions, heads and settings.
    """

    def __init__(self, options: SweepOptions) -> None:
        self.options = options
        self.store = OutcomeStore(options.output)

    def run(self) -> Outcomes | None:
        """Generate what the store lacks, score it, and return the outcomes (None on ranks but the first).

        Raises:
            InputError: something does not fit; before the model is loaded where that can be known.
        """
        begin = time.perf_counter()
        tasks = self._load_tasks()
        doc_ids = self._draw(tasks)
        if self.store.about.exists():
            self.store.check()  # a broken one is refused now
        pool = HeadPool(self.options.heads or "+".join(f"L{layer}H*" for layer in self.options.layers))
        lm = self._load_model(pool)
        try:
            prompting = {
                "system_instruction": self.options.system_instruction,
                "apply_chat_template": self.options.apply_chat_template,
                "fewshot_as_multiturn": self.options.apply_chat_template,  # as lm-eval's command does
            }
            tasks = {name: tasks[name] for name in doc_ids}
            self._build_requests(tasks, doc_ids, lm, len(pool.pool), prompting)
            self._prepare_store(tasks, lm, pool)
            results = lm_eval.simple_evaluate(
                model=lm,
                tasks=list(tasks.values()),
                num_fewshot=self.options.num_fewshot,
                gen_kwargs=self.options.gen_kwargs or None,
                samples=doc_ids,
                bootstrap_iters=0,
                task_manager=task_manager(),
                **prompting,
            )
            if lm.rank:
                lm.close()  # all is written
            lm.any_rank(False)  # wait for the others
            if lm.rank or results is None:
                return None
            self.store.add(self._cells(tasks, results["samples"]))
            assert lm.answering.store
            lm.answering.store.compact()  # before another run may write
        finally:
            lm.close()
        logger.info("%.1f seconds", time.perf_counter() - begin)
        return self.store.read()

    # ------------------------------------------------------------------ tasks and questions

    def _load_tasks(self) -> dict[str, SweptTask]:
        metadata = dict(self.options.metadata)
        if self.options.split:
            metadata["data_split"] = self.options.split
        tasks = load_tasks(task_manager(metadata), self.options.tasks)
        for name, task in tasks.items():
            self._check_task(name, task)
            self._choose_split(name, task)
        return {name: swept(task, self.options.metric) for name, task in sorted(tasks.items())}

    def _check_task(self, name: str, task: Task) -> None:
        declared = task.get_config("generation_kwargs") or {}
        if task.get_config("output_type") != "generate_until":
            raise InputError(f"task {name} is not generative; a sweep needs answers that are generated")
        if (task.get_config("repeats") or 1) > 1:
            raise InputError(f"task {name} has repeats; sweep the greedy task it is made of")
        if generation.is_sampling({**declared, **self.options.gen_kwargs}):
            raise InputError(f"task {name} samples; a sweep is greedy: add do_sample=false,temperature=0 to gen_kwargs")

    def _choose_split(self, name: str, task: ConfigurableTask) -> None:
        split = self.options.split
        if not split:
            return
        if "prune_data" in (task.get_config("dataset_kwargs") or {}):  # ours have read data_split
            shots = self.options.num_fewshot
            shots = task.get_config("num_fewshot") if shots is None else shots
            if shots and task.get_config("fewshot_split") == split:
                raise InputError(f"task {name} takes its exemplars from {split}; take another split, or no exemplars")
        elif split in task.dataset:
            task.set_config(key="test_split", value=split)
        else:
            raise InputError(f"task {name} has no split {split!r}; it has {', '.join(task.dataset)}")

    def _question_field(self, task: Task) -> str:
        declared = (task.get_config("metadata") or {}).get("question_field")
        return str(self.options.question_field or declared or "question")

    def _split(self, task: Task) -> str:
        return self.options.split or str(task.get_config("test_split") or task.get_config("validation_split"))

    def _draw(self, tasks: dict[str, SweptTask]) -> dict[str, list[int]]:
        """Draw the numbers of each task's documents by the seed, from all tasks together."""
        for name, task in tasks.items():
            if self._question_field(task) not in task.eval_docs[0]:
                raise InputError(
                    f"task {name} has no field {self._question_field(task)!r} that holds the question; its documents "
                    f"have {', '.join(task.eval_docs[0])}: name one with --question-field"
                )
        documents = [(name, doc_id) for name, task in tasks.items() for doc_id in range(len(task.eval_docs))]
        limit = self.options.limit
        if limit is not None:
            random.Random(self.options.seed).shuffle(documents)
            if limit > len(documents):
                logger.warning("the tasks have %d questions, fewer than limit=%d", len(documents), limit)
        drawn: dict[str, list[int]] = defaultdict(list)
        for name, doc_id in sorted(documents[:limit]):
            drawn[name].append(doc_id)
        return dict(drawn)

    # ------------------------------------------------------------------ model and store

    def _load_model(self, pool: HeadPool) -> Model:
        arguments = self.options.model_args
        for name in ("responses", "router"):
            if name in arguments:
                raise InputError(f"a sweep does not take the model argument {name}")
        if "base_url" in arguments:
            raise InputError("a sweep of servers names them once: --server URL, and no base_url among the model_args")
        arguments = {**arguments, "responses": self.options.output, "router": pool}
        if self.options.server:
            return PrunedServerLM(self.options.server, **arguments)
        # deterministic: near-ties are decided alone, so that a run that was interrupted ends as one that was not
        return PrunedHFLM(**{"deterministic": True, **arguments})

    def _build_requests(
        self,
        tasks: dict[str, SweptTask],
        doc_ids: dict[str, list[int]],
        lm: Model,
        repeats: int,
        prompting: dict[str, Any],
    ) -> None:
        """Build the requests as the evaluation will: the store is prepared by their prompts."""
        chat = self.options.apply_chat_template
        random.seed(DEFAULT_RANDOM_SEED)  # as the evaluation does: a run that goes on has the same prompts
        np.random.seed(DEFAULT_OTHER_SEED)
        for name, task in tasks.items():
            if len(doc_ids[name]) < lm.world_size:
                raise InputError(
                    f"{len(doc_ids[name])} questions of {name} cannot be shared by {lm.world_size} processes"
                )
            configure(task, repeats, self.options.num_fewshot, self.options.gen_kwargs)
            task.build_all_requests(
                samples=doc_ids[name],
                rank=lm.rank,
                world_size=lm.world_size,
                chat_template=lm.apply_chat_template if chat else None,
                tokenizer_name=lm.tokenizer_name if chat else "",
                **prompting,
            )

    def _prepare_store(self, tasks: dict[str, SweptTask], lm: Model, pool: HeadPool) -> None:
        """Prepare the store on the first rank; if it cannot, the others end too, and do not wait for it."""
        failed = True
        try:
            if lm.rank == 0:
                settings = {name: self._settings(task, lm) for name, task in tasks.items()}
                self.store.begin(_identity(lm), settings, self._questions(tasks), pool.pool)
            failed = False
        finally:
            failed_anywhere = lm.any_rank(failed)
        if failed_anywhere:
            raise InputError("the first process could not prepare the store; its message says why")

    def _settings(self, task: SweptTask, lm: Model) -> dict[str, Any]:
        """Return all settings of a task that outcomes depend on, as JSON."""
        template = lm.chat_template(True) if self.options.apply_chat_template else ""
        return {
            "generation": json.loads(json.dumps(task.get_config("generation_kwargs"), default=str)),
            "num_fewshot": task.get_config("num_fewshot"),
            "chat_template": digest(template) if template else "",
            "system_instruction": self.options.system_instruction or "",
            "metric": f"{task.metric},{task.filter}",
            "question_field": self._question_field(task),
            "version": str((task.get_config("metadata") or {}).get("version", "")),
        }

    def _questions(self, tasks: dict[str, SweptTask]) -> list[dict[str, Any]]:
        """Return the rows of the table of questions."""
        rows = []
        for name, task in tasks.items():
            question_field = self._question_field(task)
            for doc_id, prompt in sorted(task.prompts.items()):
                doc = task.eval_docs[doc_id]
                row = Question(name, self._split(task), doc_id)._asdict()
                row |= {"question": str(doc[question_field]), "prompt": prompt}
                rows.append({**row, "attributes": _attributes(doc, question_field)})
        return rows

    def _cells(self, tasks: dict[str, SweptTask], samples: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the outcomes in lm-eval's samples."""
        cells = []
        for name, rows in samples.items():
            for row in rows:
                question = Question(name, self._split(tasks[name]), row["doc_id"])._asdict()
                (_, answers) = row["arguments"][0]
                columns = {
                    "head": answers["heads"],
                    "answer": answers["answers"],
                    "length": answers["lengths"],
                    "cut_off": answers["cut_off"],
                    "outcome": row["outcomes"],
                    "extracted": row["extracted"],
                }
                tries = zip(*columns.values(), strict=True)
                cells += [{**question, **dict(zip(columns, values, strict=True))} for values in tries]
        return cells


class HeadPool(FixedOrderRouter):
    """The unpruned model, then heads in their order.

    Args:
        heads: as for `heads=`.
    """

    def __init__(self, heads: str) -> None:
        super().__init__([])
        self.heads = heads

    def fit_to(self, model_map: ModelMap, weights: str | None, interventions: list[Any]) -> None:
        """Find the heads in the model; see the base class."""
        self._pool = pool_order([DENSE, *map(str, Head.parse(self.heads, model_map))])
        super().fit_to(model_map, weights, interventions)


def _identity(lm: Model) -> dict[str, Any]:
    """Return the identity of a model in a store."""
    name = str(getattr(lm.config, "_name_or_path", ""))
    identity = {"name": Path(name).name or name, **lm.identity, "interventions": lm.answering.interventions()}
    identity |= {"versions": lm.answering.versions}
    return {**json.loads(json.dumps(identity)), **lm.outcome_identity}


def _attributes(doc: dict[str, Any], question_field: str) -> dict[str, Any]:
    """Return the short fields of a document, by which reports group questions: subject, level, grade, …"""
    hidden = {question_field, "target", "answer", "id", "unique_id", "doc_id"}
    return {
        name: value
        for name, value in doc.items()
        if name not in hidden and (isinstance(value, bool | int) or (isinstance(value, str) and len(value) <= 64))
    }
