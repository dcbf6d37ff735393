"""Identity of a task: the configuration, questions, exemplars and code that its prompts and scores depend on."""

from __future__ import annotations

import ast
import inspect
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from lmeval_prune import scoring, tasks
from lmeval_prune.artefacts import digest, files_digest
from lmeval_prune.errors import InputError, did_you_mean
from lmeval_prune.models import generation
from lmeval_prune.tasks import compat
from lmeval_prune.tasks.hub import dataset_revision
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
LM_EVAL_GENERATION_SETTINGS = ("max_gen_toks", "max_tokens", "max_completion_tokens", "until")


@dataclass(frozen=True)
class TaskIdentity:
    """Everything that the prompts and scores of a task, or of the tasks of a group, depend on."""

    content: dict[str, Any]  # JSON value by task name
    draws: bool  # exemplars or answers are drawn at random
    samples: bool  # answers are sampled
    revisions: dict[str, str] = field(default_factory=dict)  # of data sets on the Hub, by task; not in the identity

    @classmethod
    def of(cls, manager: TaskManager, grid_task: GridTask) -> TaskIdentity:
        """Load a task and identify it."""
        content: dict[str, Any] = {}
        revisions: dict[str, str] = {}
        draws = samples = False
        for name, task in sorted(load_tasks(manager, [grid_task.task]).items()):
            _configure(task, grid_task)
            _check_settings(name, task, grid_task)
            config = task.dump_config()
            revisions |= {name: revision} if (revision := dataset_revision(task)) else {}
            shots = task.get_config("num_fewshot") or 0
            generates = task.get_config("output_type") == "generate_until"
            samples |= generates and generation.is_sampling(config["generation_kwargs"])
            draws |= samples or bool(shots)
            exemplars = exemplars_of(task)
            questions = list(_first_documents(task.eval_docs, compat.sample_size(task, grid_task.limit)))
            content[name] = {
                "class": f"{type(task).__module__}.{type(task).__qualname__}",
                "version": str((config.get("metadata") or {}).get("version", "")),
                "config": _digest(_identifying_fields(config)),
                "code": code_digest(task, _identifying_fields(vars(task.config))),
                "questions": _digest([*questions, *_build_questions(task, questions)]),
                "exemplars": _digest([*exemplars, *_build_questions(task, exemplars)]),
            }
        return cls(content, draws, samples, revisions)


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
    """Return the fields of a task's configuration that its identity contains."""
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


def _check_settings(name: str, task: Any, grid_task: GridTask) -> None:
    """Raise `InputError` for a metric, a filter or a gen_kwargs setting that does not exist."""
    metric, _, filter_name = (grid_task.metric or "").partition(",")
    metrics = list(task.aggregation())
    if metric and metric not in metrics:
        raise InputError(f"{name} has no metric {metric!r}{did_you_mean(metric, metrics)}; it has {', '.join(metrics)}")
    filters = [each.name for each in compat.filters(task)]
    if filter_name and filters and filter_name not in filters:
        hint = did_you_mean(filter_name, filters)
        raise InputError(f"{name} has no filter {filter_name!r}{hint}; it has {', '.join(filters)}")
    known = [*LM_EVAL_GENERATION_SETTINGS, *GenerationConfig().to_dict()]
    for setting in grid_task.gen_kwargs:
        if setting not in known:
            raise InputError(f"gen_kwargs: there is no setting {setting!r}{did_you_mean(setting, known)}; leave it out")


def _build_questions(task: Any, docs: list[Any]) -> list[Any]:
    """Build each question's prompt, target and choices."""
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
    """Yield the first `count` documents of a data set; all for None."""
    for index in range(len(values) if count is None else min(count, len(values))):
        yield values[index]


def _digest(value: Any) -> str:
    """Return the digest of a value's JSON form."""
    return digest(json.loads(json.dumps(value, default=_name_of)))


def _name_of(value: Any) -> str:
    """Name a value that has no JSON form, without its memory address."""
    kind = type(value) if type(value).__str__ is object.__str__ else None
    return getattr(value, "__qualname__", None) or (kind.__qualname__ if kind else str(value))


# ---------------------------------------------------------------------- code


def code_digest(task: Any, settings: dict[str, Any]) -> str:
    """Return a digest of a task's code that does not depend on where the code is stored.

    It covers the files of the task's functions and classes and the files that these import from the same folders. If
    they import this package, it covers all code of the package's tasks and scoring, with the word lists. Other packages
    count by their versions. `settings` is the task's configuration, with functions among the values.
    """
    classes = [kind for kind in type(task).__mro__ if not _is_harness(kind.__module__)]
    sources = {path for each in [*_callables(settings), *classes] if (path := _source(each))}
    return files_digest(set().union(*(_with_imports(path, path.stat().st_mtime_ns) for path in sources)))


def _is_harness(module: str) -> bool:
    return module == "builtins" or (module.startswith("lm_eval.") and not module.startswith("lm_eval.tasks."))


def _callables(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _callables(item)
    elif callable(value):
        yield inspect.unwrap(getattr(value, "func", value))


def _source(value: Any) -> Path | None:
    """Return the file of a function, a class, or an object's class."""
    try:
        path = Path(inspect.getfile(value)).resolve()
    except TypeError:  # a built-in, or a callable object
        return None if isinstance(value, type) else _source(type(value))
    return path if path.is_file() else None


@cache
def _with_imports(path: Path, mtime: int) -> frozenset[Path]:
    """Return a file, the files that it imports directly or indirectly, and the word lists beside them."""
    files: set[Path] = set()
    pending, imports_package = [path], False
    while pending:
        file = pending.pop()
        if file not in files:
            files.add(file)
            imports = list(_imports(file))
            imports_package |= any(parts[0] == "lmeval_prune" for _, parts in imports)
            pending += _modules(imports)
    if imports_package:
        roots = [Path(root).resolve() for package in (scoring, tasks) for root in package.__path__]
        files |= {file for root in roots for file in root.rglob("*.py")}
    words = {words for folder in {file.parent for file in files} for words in folder.glob("words/*.yaml")}
    return frozenset(files | words)


def _imports(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield each import of a file: the folder that it starts from, and the parts of the module's name."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a compiled module
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((path.parent, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[max(node.level - 1, 0)]
            module = node.module.split(".") if node.module else []
            yield from ((folder, [*module, alias.name]) for alias in node.names)


def _modules(imports: list[tuple[Path, list[str]]]) -> Iterator[Path]:
    """Yield the existing files of imports: modules, and `__init__.py` of packages."""
    for folder, parts in imports:
        for number in range(len(parts)):
            name = folder.joinpath(*parts[: number + 1])
            yield from (path.resolve() for path in (name.with_suffix(".py"), name / "__init__.py") if path.is_file())
