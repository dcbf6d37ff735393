"""`lmeval-prune sweep`: a task's questions under every head of some layers, pruned one at a time (SPRINT §3.1)."""

from __future__ import annotations

import json
import logging
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager

from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError, first_line
from lmeval_prune.interventions import HeadMask
from lmeval_prune.interventions.heads import parse_selectors
from lmeval_prune.models import batched
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.sprint.outcomes import DENSE, Outcomes, OutcomeStore, Question, pool_order

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sweep:
    """What to run.

    Attributes:
        model_args: as for `--model pruned-hf`.
        tasks: names of generative tasks or groups of them.
        output: folder of the outcome store; extended if it exists.
        split: of the data; None for the one that the task asks.
        layers: whose heads are pruned, one at a time; all heads of a layer.
        heads: instead of layers, heads as for `heads=`.
        limit: so many questions, drawn by the seed; a larger limit holds the questions of a smaller one.
        metric: which decides the outcome, with `,FILTER` if the task has several filters.
        question_field: field of a document that holds the question; None: what the task's metadata declares,
            else `question`.
        deterministic: near-ties are decided alone, so that a run that was interrupted ends as one that was not.
    """

    model_args: dict[str, Any]
    tasks: tuple[str, ...]
    output: str
    split: str | None = None
    layers: tuple[int, ...] = (5, 10, 15, 20, 25)
    heads: str | None = None
    limit: int | None = None
    seed: int = 0
    metric: str | None = None
    question_field: str | None = None
    num_fewshot: int | None = None
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    apply_chat_template: bool = False
    system_instruction: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    deterministic: bool = True

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
        lm = self._model()
        pool = self._pool(lm)
        requests, rows = self._requests(lm, tasks, asked)
        settings = {name: self._settings(task, lm) for name, task in tasks.items()}
        score = Scorer(tasks, {name: s["metric"] for name, s in settings.items()}, requests)
        score.check()
        try:
            self._begin(lm, store, settings, rows, pool)
            self._generate(lm, store, requests, pool)
            store.end_journal()
            lm._any_rank(False)  # wait for the others
            if lm.rank:
                return None
            store.merge()
            generated = time.perf_counter() - begin
            scored = store.score(score, requests)
            seconds = {"generating": round(generated, 1), "scoring": round(time.perf_counter() - begin - generated, 1)}
            logger.info("%d answers scored; seconds: %s", scored, seconds)
        finally:
            store.close()
        return store.read()

    def _begin(
        self, lm: PrunedHFLM, store: OutcomeStore, settings: dict[str, Any], rows: list[dict[str, Any]], pool: list[str]
    ) -> None:
        """The first rank prepares the store; if it cannot, the others end too, and do not wait for it."""
        failed = True
        try:
            if lm.rank == 0:
                store.begin(_model_identity(lm), settings, rows, pool)
            failed = False
        finally:
            others = lm._any_rank(failed)
        if others:
            raise InputError("the first process could not prepare the store; its message says why")
        store.open(lm.rank)

    # ------------------------------------------------------------------ tasks and questions

    def _tasks(self) -> dict[str, ConfigurableTask]:
        metadata = dict(self.metadata)
        if self.split:
            metadata["data_split"] = self.split
        manager = TaskManager(metadata=metadata)
        unknown = [name for name in self.tasks if name not in manager.all_tasks and not Path(name).is_file()]
        if unknown or not self.tasks:
            raise InputError(f"there is no task {', '.join(unknown) or 'to run'}; `lm_eval ls tasks` lists them")
        try:
            found = manager.load(list(self.tasks))["tasks"]
        except InputError:
            raise
        except Exception as error:  # whatever a data set's loader raises
            raise InputError(f"the tasks cannot be loaded ({first_line(error)})") from error
        for name, task in found.items():
            self._check(name, task)
            if self.gen_kwargs:
                task.set_config(key="generation_kwargs", value=dict(self.gen_kwargs), update=True)
            own = task.get_config("num_fewshot")
            if self.num_fewshot is not None and own == 0 != self.num_fewshot:
                logger.warning(
                    "task %s sets num_fewshot to 0 itself; num_fewshot=%d is left out, as lm-eval does",
                    name,
                    self.num_fewshot,
                )
            elif self.num_fewshot is not None:
                own = self.num_fewshot
            task.set_config(key="num_fewshot", value=own or 0)
            self._choose_split(name, task)
            task.set_fewshot_seed(seed=1234)  # lm-eval's
        return dict(sorted(found.items()))

    def _choose_split(self, name: str, task: ConfigurableTask) -> None:
        if not self.split:
            return
        if "prune_data" in (task.get_config("dataset_kwargs") or {}):  # ours have read data_split
            if task.get_config("num_fewshot") and task.get_config("fewshot_split") == self.split:
                raise InputError(
                    f"task {name} takes its exemplars from {self.split}; ask another split, or no exemplars"
                )
        elif self.split in task.dataset:
            task.set_config(key="test_split", value=self.split)
        else:
            raise InputError(f"task {name} has no split {self.split!r}; it has {', '.join(task.dataset)}")

    def _check(self, name: str, task: Task) -> None:
        generation = task.get_config("generation_kwargs") or {}
        if task.get_config("output_type") != "generate_until":
            raise InputError(f"task {name} is not generative; a sweep needs answers that are generated")
        if (task.get_config("repeats") or 1) > 1:
            raise InputError(f"task {name} has repeats; sweep the greedy task it is made of")
        if batched.samples({**generation, **self.gen_kwargs}):
            raise InputError(f"task {name} samples; a sweep is greedy: add do_sample=false,temperature=0 to gen_kwargs")

    def _field(self, task: Task) -> str:
        declared = (task.get_config("metadata") or {}).get("question_field")
        return str(self.question_field or declared or "question")

    def _asked(self, tasks: dict[str, ConfigurableTask]) -> list[tuple[str, int]]:
        """Tasks and documents, drawn by the seed from all tasks together."""
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
        return sorted(every[: self.limit])

    def _requests(
        self, lm: PrunedHFLM, tasks: dict[str, ConfigurableTask], asked: list[tuple[str, int]]
    ) -> tuple[dict[Question, Instance], list[dict[str, Any]]]:
        """lm-eval's own requests of the documents, and rows of the questions' table."""
        numbers: dict[str, list[int]] = defaultdict(list)
        for name, number in asked:
            numbers[name].append(number)
        requests, rows = {}, []
        for name, chosen in numbers.items():
            task = tasks[name]
            # exemplars are drawn document by document: with few-shot, all prompts are made, to be lm-eval's own
            everything = bool(task.get_config("num_fewshot"))
            task.build_all_requests(
                samples=None if everything else chosen,
                system_instruction=self.system_instruction,
                apply_chat_template=self.apply_chat_template,
                fewshot_as_multiturn=self.apply_chat_template,  # as lm-eval's command does
                chat_template=lm.apply_chat_template if self.apply_chat_template else None,
                tokenizer_name=lm.tokenizer_name if self.apply_chat_template else "",
            )
            split = self.split or str(task.get_config("test_split") or task.get_config("validation_split"))
            wanted = set(chosen)
            for request in task.instances:
                number = request.doc_id if everything else chosen[request.doc_id]
                if number not in wanted:
                    continue
                place = Question(name, split, number)
                requests[place] = replace(request, metadata=(name, number, 1))
                rows.append(
                    {
                        **place._asdict(),
                        "question": str(request.doc[self._field(task)]),
                        "prompt": digest(request.args[0]),
                        "attributes": _attributes(request.doc, self._field(task)),
                    }
                )
        return requests, rows

    def _settings(self, task: ConfigurableTask, lm: PrunedHFLM) -> dict[str, Any]:
        """Everything of a task that outcomes depend on, as JSON."""
        template = lm.chat_template(self.apply_chat_template) if self.apply_chat_template else ""
        return {
            "generation": json.loads(json.dumps(task.get_config("generation_kwargs"), default=str)),
            "num_fewshot": task.get_config("num_fewshot"),
            "chat_template": digest(template) if template else "",
            "system_instruction": self.system_instruction or "",
            "metric": self._metric(task),
            "question_field": self._field(task),
            "version": str((task.get_config("metadata") or {}).get("version", "")),
        }

    def _metric(self, task: ConfigurableTask) -> str:
        filters = [f.name for f in task._filters]
        names = [metric["metric"] for metric in task.get_config("metric_list") or []]
        metric, _, name = (self.metric or "").partition(",")
        metric = metric or ("exact_match" if "exact_match" in names or not names else names[0])
        name = name or filters[0]
        if name not in filters:
            raise InputError(f"task {task.task_name} has no filter {name!r}; it has {', '.join(filters)}")
        return f"{metric},{name}"

    # ------------------------------------------------------------------ model and pool

    def _model(self) -> PrunedHFLM:
        arguments = dict(self.model_args)
        for name in ("responses", "router"):
            if name in arguments:
                raise InputError(f"a sweep does not take the model argument {name}")
        arguments |= {"engine": "batched", "deterministic": arguments.get("deterministic", self.deterministic)}
        return PrunedHFLM(**arguments)

    def _pool(self, lm: PrunedHFLM) -> list[str]:
        assert lm.engine is not None
        attention = lm.engine.attention
        text = self.heads or "+".join(f"L{layer}H*" for layer in self.layers)
        pool = [str(head) for selector in parse_selectors(text) for head in selector.expand(attention)]
        for name in pool:
            HeadMask.parse(name).heads(attention)  # refuses to empty a layer
        return pool_order([DENSE, *pool])

    def _generate(
        self, lm: PrunedHFLM, store: OutcomeStore, requests: dict[Question, Instance], pool: Sequence[str]
    ) -> None:
        assert lm.engine is not None
        known = store.answered()
        mine = sorted(requests)[lm.rank :: lm.world_size]
        todo = [(place, head) for place in mine for head in pool if (place, head) not in known]
        if len(todo) < len(mine) * len(pool):
            logger.info(
                "%d of %d answers found in %s", len(mine) * len(pool) - len(todo), len(mine) * len(pool), store.folder
            )
        masks = {head: None if head == DENSE else HeadMask.parse(head) for head in pool}
        lm.engine.progress = lm.rank == 0

        def done(number: int, text: str, tokens: list[int]) -> None:
            store.add(*todo[number], text, tokens)

        batched.generate_until(
            lm,
            lm.engine,
            [requests[place] for place, _ in todo],
            [0] * len(todo),
            done,
            0,
            [masks[head] for _, head in todo],
        )


@dataclass
class Scorer:
    """Scores answers as the tasks do: through the tasks' filters and metrics.

    Attributes:
        tasks: by name.
        metrics: of each task, `METRIC,FILTER`.
        requests: of each question, lm-eval's request.
    """

    tasks: dict[str, ConfigurableTask]
    metrics: dict[str, str]
    requests: dict[Question, Instance]

    def check(self) -> None:
        """Score an empty answer to each task, so that a wrong metric is found before anything is generated."""
        first = {place.task: place for place in reversed(self.requests)}
        self([(place, {"text": ""}) for place in first.values()])

    def __call__(self, answers: list[tuple[Question, dict[str, Any]]]) -> list[tuple[bool, str]]:
        """Whether each answer is right, and what was extracted from it (empty if the task does not say).

        Raises:
            InputError: the metric is not there, or is not 0 or 1.
        """
        found: list[tuple[bool, str]] = [(False, "")] * len(answers)
        for name, task in self.tasks.items():
            places = [i for i, (place, _) in enumerate(answers) if place.task == name]
            if not places:
                continue
            instances = []
            for i in places:
                place, cell = answers[i]
                instances.append(replace(self.requests[place], resps=[cell["text"]], filtered_resps={}))
            metric, _, key = self.metrics[name].partition(",")
            for ensemble in task._filters:
                if ensemble.name == key:
                    ensemble.apply(instances)
            for i, instance in zip(places, instances, strict=True):
                scores = task.process_results(instance.doc, [instance.filtered_resps[key]])
                if metric not in scores or float(scores[metric]) not in (0.0, 1.0):
                    has = ", ".join(f"{k}={v}" for k, v in scores.items() if isinstance(v, int | float))
                    raise InputError(
                        f"task {name}: {metric} is not a metric that is 0 or 1; it has {has}: use --metric"
                    )
                found[i] = (bool(scores[metric]), str(scores.get("extracted", "")))
        return found


def _model_identity(lm: PrunedHFLM) -> dict[str, Any]:
    name = str(getattr(lm.config, "_name_or_path", ""))
    assert lm.engine is not None
    identity = json.loads(json.dumps(lm.identity))
    return {"name": Path(name).name or name, **identity, "deterministic": lm.engine.deterministic}


def _attributes(doc: dict[str, Any], question: str) -> dict[str, Any]:
    """Short fields of a document, by which reports group questions: subject, level, grade, …"""

    def short(value: Any) -> bool:
        return isinstance(value, bool | int) or (isinstance(value, str) and len(value) <= 64)

    hidden = {question, "target", "answer", "id", "unique_id", "doc_id"}
    return {key: value for key, value in doc.items() if key not in hidden and short(value)}
