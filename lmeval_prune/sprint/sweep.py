"""`lmeval-prune sweep`: a task's questions under every head of some layers, pruned one at a time (SPRINT §3.1).

A sweep is lm-eval's own evaluation of the task, asked once for every member of the pool, try i under member i.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval
from lm_eval.api.task import ConfigurableTask, Task

from lmeval_prune.architectures import Head, ModelMap
from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError
from lmeval_prune.models import generation
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.models.pruned_server import PrunedServerLM
from lmeval_prune.models.tries import DENSE, InTurn
from lmeval_prune.sprint.options import SweepOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore, Question, pool_order
from lmeval_prune.sprint.swept_task import SweptTask, swept
from lmeval_prune.tasks.named import load_tasks, task_manager

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

logger = logging.getLogger(__name__)
Model = PrunedHFLM | PrunedServerLM


class Sweep(SweepOptions):
    """Runs what the options say."""

    def run(self) -> Outcomes | None:
        """Generate what the store lacks, score it, and return the outcomes (None on ranks but the first).

        Raises:
            InputError: something does not fit; before the model is loaded where that can be known.
        """
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit must be at least 1, not {self.limit}")
        begin = time.perf_counter()
        tasks = self._tasks()
        asked = self._asked(tasks)
        store = OutcomeStore(self.output)
        if store.about.exists():
            store.check()  # a broken one is refused now
        pool = Pool(self.heads or "+".join(f"L{layer}H*" for layer in self.layers))
        lm = self._model(pool)
        try:
            for name, numbers in asked.items():
                tasks[name].set_config(key="repeats", value=len(pool.pool))
                if len(numbers) < lm.world_size:
                    raise InputError(
                        f"{len(numbers)} questions of {name} cannot be shared by {lm.world_size} processes"
                    )
            pool.begin = lambda: self._begin(lm, store, tasks, asked, pool)
            results = lm_eval.simple_evaluate(
                model=lm,
                tasks=[tasks[name] for name in asked],
                num_fewshot=self.num_fewshot,
                gen_kwargs=self.gen_kwargs or None,
                samples=asked,
                bootstrap_iters=0,
                system_instruction=self.system_instruction,
                apply_chat_template=self.apply_chat_template,
                fewshot_as_multiturn=self.apply_chat_template,  # as lm-eval's command does
                task_manager=self._manager,
            )
            if lm.rank:
                lm.close()  # all is written
            lm.any_rank(False)  # wait for the others
            if lm.rank or results is None:
                return None
            store.add(self._cells(tasks, results["samples"]))
            assert lm.answering.store
            lm.answering.store.compact()  # before another run may write
        finally:
            lm.close()
        logger.info("%.1f seconds", time.perf_counter() - begin)
        return store.read()

    def _begin(
        self,
        lm: Model,
        store: OutcomeStore,
        tasks: dict[str, SweptTask],
        asked: dict[str, list[int]],
        pool: Pool,
    ) -> None:
        """The first rank prepares the store; if it cannot, the others end too, and do not wait for it."""
        failed = True
        try:
            if lm.rank == 0:
                settings = {name: self._settings(tasks[name], lm) for name in asked}
                store.begin(self._identity(lm), settings, self._rows(tasks, asked), pool.pool)
            failed = False
        finally:
            others = lm.any_rank(failed)
        if others:
            raise InputError("the first process could not prepare the store; its message says why")

    def _cells(self, tasks: dict[str, SweptTask], samples: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Outcomes, from lm-eval's samples."""
        cells = []
        for name, rows in samples.items():
            for row in rows:
                where = Question(name, self._split(tasks[name]), row["doc_id"])._asdict()
                (_, done) = row["arguments"][0]
                names = ("head", "answer", "length", "cut_off", "outcome", "extracted")
                columns = (done["heads"], done["answers"], done["lengths"], done["cut_off"])
                found = zip(*columns, row["outcomes"], row["extracted"], strict=True)
                cells += [{**where, **dict(zip(names, values, strict=True))} for values in found]
        return cells

    # ------------------------------------------------------------------ tasks and questions

    @cached_property
    def _manager(self) -> TaskManager:
        metadata = dict(self.metadata)
        if self.split:
            metadata["data_split"] = self.split
        return task_manager(metadata)

    def _tasks(self) -> dict[str, SweptTask]:
        found = load_tasks(self._manager, list(self.tasks))
        for name, task in found.items():
            self._check(name, task)
            self._choose_split(name, task)
        return {name: swept(task, self.metric) for name, task in sorted(found.items())}

    def _choose_split(self, name: str, task: ConfigurableTask) -> None:
        if not self.split:
            return
        if "prune_data" in (task.get_config("dataset_kwargs") or {}):  # ours have read data_split
            shots = task.get_config("num_fewshot") if self.num_fewshot is None else self.num_fewshot
            if shots and task.get_config("fewshot_split") == self.split:
                raise InputError(
                    f"task {name} takes its exemplars from {self.split}; ask another split, or no exemplars"
                )
        elif self.split in task.dataset:
            task.set_config(key="test_split", value=self.split)
        else:
            raise InputError(f"task {name} has no split {self.split!r}; it has {', '.join(task.dataset)}")

    def _check(self, name: str, task: Task) -> None:
        made = task.get_config("generation_kwargs") or {}
        if task.get_config("output_type") != "generate_until":
            raise InputError(f"task {name} is not generative; a sweep needs answers that are generated")
        if (task.get_config("repeats") or 1) > 1:
            raise InputError(f"task {name} has repeats; sweep the greedy task it is made of")
        if generation.samples({**made, **self.gen_kwargs}):
            raise InputError(f"task {name} samples; a sweep is greedy: add do_sample=false,temperature=0 to gen_kwargs")

    def _field(self, task: Task) -> str:
        declared = (task.get_config("metadata") or {}).get("question_field")
        return str(self.question_field or declared or "question")

    def _split(self, task: Task) -> str:
        return self.split or str(task.get_config("test_split") or task.get_config("validation_split"))

    def _asked(self, tasks: dict[str, SweptTask]) -> dict[str, list[int]]:
        """Numbers of each task's documents, drawn by the seed from all tasks together."""
        for name, task in tasks.items():
            if self._field(task) not in task.eval_docs[0]:
                raise InputError(
                    f"task {name} has no field {self._field(task)!r} that holds the question; its documents have "
                    f"{', '.join(task.eval_docs[0])}: name one with --question-field"
                )
        every = [(name, number) for name, task in tasks.items() for number in range(len(task.eval_docs))]
        if self.limit is not None:
            random.Random(self.seed).shuffle(every)
            if self.limit > len(every):
                logger.warning("the tasks have %d questions, fewer than limit=%d", len(every), self.limit)
        found: dict[str, list[int]] = defaultdict(list)
        for name, number in sorted(every[: self.limit]):
            found[name].append(number)
        return dict(found)

    def _rows(self, tasks: dict[str, SweptTask], asked: dict[str, list[int]]) -> list[dict[str, Any]]:
        """The table of questions."""
        rows = []
        for name, numbers in asked.items():
            task = tasks[name]
            for number in numbers:
                doc = task.eval_docs[number]
                row = Question(name, self._split(task), number)._asdict()
                row |= {"question": str(doc[self._field(task)]), "prompt": task.prompts[number]}
                rows.append({**row, "attributes": _attributes(doc, self._field(task))})
        return rows

    def _settings(self, task: SweptTask, lm: Model) -> dict[str, Any]:
        """Everything of a task that outcomes depend on, as JSON."""
        template = lm.chat_template(self.apply_chat_template) if self.apply_chat_template else ""
        return {
            "generation": json.loads(json.dumps(task.get_config("generation_kwargs"), default=str)),
            "num_fewshot": task.get_config("num_fewshot"),
            "chat_template": digest(template) if template else "",
            "system_instruction": self.system_instruction or "",
            "metric": f"{task.metric},{task.filter}",
            "question_field": self._field(task),
            "version": str((task.get_config("metadata") or {}).get("version", "")),
        }

    # ------------------------------------------------------------------ model

    def _model(self, pool: Pool) -> Model:
        for name in ("responses", "router"):
            if name in self.model_args:
                raise InputError(f"a sweep does not take the model argument {name}")
        if "base_url" in self.model_args:
            raise InputError("a sweep of servers names them once: --server URL, and no base_url among the model_args")
        arguments = {**self.model_args, "responses": self.output, "router": pool}
        if self.server:
            return PrunedServerLM(self.server, **arguments)
        # deterministic: near-ties are decided alone, so that a run that was interrupted ends as one that was not
        return PrunedHFLM(**{"deterministic": True, **arguments})

    def _identity(self, lm: Model) -> dict[str, Any]:
        name = str(getattr(lm.config, "_name_or_path", ""))
        found = {"name": Path(name).name or name, **lm.identity, "interventions": lm.answering.interventions()}
        found |= {"versions": lm.answering.versions}
        return {**json.loads(json.dumps(found)), **lm.outcomes_of}


class Pool(InTurn):
    """The unpruned model, then heads in their order.

    Args:
        heads: as for `heads=`.

    Attributes:
        begin: called before anything is decoded.
    """

    def __init__(self, heads: str) -> None:
        super().__init__([])
        self.heads = heads
        self.begin: Callable[[], None] = lambda: None

    def fit_to(self, model_map: ModelMap, weights: str | None, interventions: list[Any]) -> None:
        """Find the heads in the model; see the base class."""
        self._pool = pool_order([DENSE, *map(str, Head.parse(self.heads, model_map))])
        super().fit_to(model_map, weights, interventions)

    def prepare(self, requests: Sequence[Any]) -> None:
        """Call `begin`."""
        self.begin()


def _attributes(doc: dict[str, Any], question: str) -> dict[str, Any]:
    """Short fields of a document, by which reports group questions: subject, level, grade, …"""

    def short(value: Any) -> bool:
        return isinstance(value, bool | int) or (isinstance(value, str) and len(value) <= 64)

    hidden = {question, "target", "answer", "id", "unique_id", "doc_id"}
    return {key: value for key, value in doc.items() if key not in hidden and short(value)}
