"""Identity of a task: the configuration, questions, exemplars and code that its prompts and scores depend on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from lm_eval.evaluator_utils import get_sample_size

from lmeval_prune.artefacts import digest
from lmeval_prune.models import generation
from lmeval_prune.tasks.code import code_digest
from lmeval_prune.tasks.loading import load_tasks
from lmeval_prune.tasks.prompts import exemplars_of, training_documents

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from lmeval_prune.grid.configuration import GridTask

# fields of a task's configuration that name the task or locate its data; the questions themselves are hashed
IGNORED_FIELDS = {
    *("dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset", "metadata", "tag", "group", "task_alias"),
    *("training_split", "validation_split", "test_split", "fewshot_split"),
}


@dataclass(frozen=True)
class TaskIdentity:
    """Everything that the prompts and scores of a task, or of the tasks of a group, depend on."""

    content: dict[str, Any]  # JSON value by task name
    draws: bool  # exemplars or answers are drawn at random
    samples: bool  # answers are sampled

    @classmethod
    def of(cls, manager: TaskManager, grid_task: GridTask) -> TaskIdentity:
        """Load a task and identify it."""
        content: dict[str, Any] = {}
        draws = samples = False
        for name, task in sorted(load_tasks(manager, [grid_task.task]).items()):
            _configure(task, grid_task)
            config = task.dump_config()
            shots = task.get_config("num_fewshot") or 0
            generates = task.get_config("output_type") == "generate_until"
            samples |= generates and generation.is_sampling(config["generation_kwargs"])
            draws |= samples or bool(shots)
            exemplars = exemplars_of(task)
            questions = list(_first_documents(task.eval_docs, get_sample_size(task, grid_task.limit)))
            content[name] = {
                "class": f"{type(task).__module__}.{type(task).__qualname__}",
                "version": str((config.get("metadata") or {}).get("version", "")),
                "config": _digest(_identifying_fields(config)),
                "code": code_digest(task, _identifying_fields(vars(task.config))),
                "questions": _digest([*questions, *_build_questions(task, questions)]),
                "exemplars": _digest([*exemplars, *_build_questions(task, exemplars)]),
            }
        return cls(content, draws, samples)


@cache
def training_digest(name: str) -> str:
    """Return a digest of a task's configuration, and of its training problems and exemplars with prompts and answers.

    It is computed once for a grid: `cells_of` clears the cache.
    """
    task, documents = training_documents(name)
    fields = _identifying_fields(task.dump_config())
    parts = [documents, *filter(None, [exemplars_of(task)])]
    return _digest([fields, *(value for part in parts for value in (part, _build_questions(task, part)))])


def _identifying_fields(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in IGNORED_FIELDS}


def _configure(task: Any, grid_task: GridTask) -> None:
    """Change a task's configuration as `simple_evaluate` does."""
    if grid_task.gen_kwargs and task.get_config("output_type") == "generate_until":
        task.set_config(key="generation_kwargs", value=dict(grid_task.gen_kwargs), update=True)
    shots = task.get_config("num_fewshot")
    if grid_task.num_fewshot is not None and shots != 0:
        task.set_config(key="num_fewshot", value=grid_task.num_fewshot)
    elif shots is None:
        task.set_config(key="num_fewshot", value=0)


def _build_questions(task: Any, docs: list[Any]) -> list[Any]:
    names = ["doc_to_text", "doc_to_target", *(["doc_to_choice"] if task.get_config("doc_to_choice") else [])]
    state = random.getstate()
    try:
        random.seed(0)  # so that a prompt's random parts do not change the identity
        return [_build_part(getattr(task, name), doc) for doc in docs for name in names]
    finally:
        random.setstate(state)


def _build_part(build: Callable[[Any], Any], doc: Any) -> Any:
    """Return a prompt, target or list of choices; if the task cannot build it, the name of the error."""
    try:
        return build(doc)
    except Exception as error:  # some types of tasks lack a part
        return type(error).__name__


def _first_documents(values: Any, count: int | None) -> Iterator[Any]:
    for index in range(len(values) if count is None else min(count, len(values))):
        yield values[index]


def _digest(value: Any) -> str:
    return digest(json.loads(json.dumps(value, default=_name_of)))


def _name_of(value: Any) -> str:
    """Name a value that has no JSON form, without its memory address."""
    kind = type(value) if type(value).__str__ is object.__str__ else None
    return getattr(value, "__qualname__", None) or (kind.__qualname__ if kind else str(value))
