"""Identity of a task: configuration, questions, few-shot examples and code that its prompts and scores depend on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval.evaluator_utils import get_sample_size

from lmeval_prune.artefacts import digest, without_addresses
from lmeval_prune.models import generation
from lmeval_prune.tasks.loading import check_task_names, code_digest
from lmeval_prune.tasks.prompts import exemplars_of

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from lmeval_prune.grid.configuration import GridTask

# fields of a task's configuration that name the task or locate its data; the questions themselves are hashed
IGNORED_FIELDS = {
    *("dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset", "metadata", "tag", "group", "task_alias"),
    *("training_split", "validation_split", "test_split", "fewshot_split"),
}


class TaskIdentity(NamedTuple):
    """Everything that the prompts and scores of a task, or of the tasks of a group, depend on."""

    content: dict[str, str]  # digests by task name
    draws: bool  # few-shot examples or answers are drawn at random
    samples: bool  # answers are sampled
    loaded: Any  # what lm-eval's task manager has loaded, so that cells are computed from what is identified


def identify(manager: TaskManager, grid_task: GridTask) -> TaskIdentity:
    content: dict[str, str] = {}
    draws = samples = False
    check_task_names(manager, [grid_task.task])
    loaded = manager.load([grid_task.task])
    for name, task in sorted(loaded["tasks"].items()):
        if grid_task.gen_kwargs and task.get_config("output_type") == "generate_until":  # as `simple_evaluate` does
            task.set_config(key="generation_kwargs", value=dict(grid_task.gen_kwargs), update=True)
        shots = task.get_config("num_fewshot")
        if grid_task.num_fewshot is not None and shots != 0:
            task.set_config(key="num_fewshot", value=grid_task.num_fewshot)
        elif shots is None:
            task.set_config(key="num_fewshot", value=0)
        config = task.dump_config()
        generates = task.get_config("output_type") == "generate_until"
        samples |= generates and generation.is_sampling(config["generation_kwargs"])
        draws |= samples or bool(task.get_config("num_fewshot"))
        documents, count = task.eval_docs, get_sample_size(task, grid_task.limit)
        questions = [documents[i] for i in range(len(documents) if count is None else min(count, len(documents)))]
        content[name] = task_digest(task, [(config.get("metadata") or {}).get("version"), questions])
    return TaskIdentity(content, draws, samples, loaded)


def task_digest(task: Any, documents: Any) -> str:
    """Return a digest of documents and of what else the prompts and scores of a task depend on."""
    config, fields = (
        {k: v for k, v in d.items() if k not in IGNORED_FIELDS} for d in (task.dump_config(), vars(task.config))
    )
    kind = f"{type(task).__module__}.{type(task).__qualname__}"
    value = [kind, config, code_digest(task, fields), exemplars_of(task), documents]

    def as_text(part: Any) -> str:
        return getattr(part, "__qualname__", None) or without_addresses(str(part))

    return digest(json.loads(json.dumps(value, default=as_text)))
