"""Tasks by name: how they are loaded, the splits that they score, and a digest of their code."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmeval_prune
from lmeval_prune.artefacts import files_digest
from lmeval_prune.errors import InputError

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

logger = logging.getLogger(__name__)
_included: ContextVar[str | None] = ContextVar("include_path", default=None)


@contextmanager
def including(folder: str | None) -> Iterator[None]:
    """Let each `task_manager` have the tasks of a user's folder, too; None: no other folder."""
    token = _included.set(folder)
    try:
        yield
    finally:
        _included.reset(token)


def included_folder() -> str | None:
    """Return the user's folder of tasks, see `including`."""
    return _included.get()


def task_manager(metadata: Mapping[str, Any] | None = None) -> TaskManager:
    """Return a task manager with this package's, the user's and lm-eval's tasks; `metadata` is passed to the tasks."""
    from lmeval_prune.tasks.manager import LazyTaskManager

    return LazyTaskManager(include_path=included_folder(), metadata=dict(metadata or {}))


def check_task_names(manager: TaskManager, names: Sequence[str]) -> None:
    """Refuse names that are no task, group, tag, or file."""
    from lmeval_prune.tasks.manager import unknown_task_error

    if unknown := [name for name in names if not Path(name).is_file() and name not in manager._index]:
        raise unknown_task_error(unknown, manager.all_tasks)


def load_tasks(manager: TaskManager, names: Sequence[str]) -> dict[str, Any]:
    """Load tasks, and the tasks of groups and tags, by name; a name can be the path of a YAML file."""
    check_task_names(manager, names)
    loaded: dict[str, Any] = manager.load(list(names))["tasks"]
    return loaded


def load_task(manager: TaskManager, name: str) -> Any:
    """Load one task by its name or the path of its file; `InputError` if it is a group."""
    loaded = load_tasks(manager, [name])
    if name in loaded:
        return loaded[name]
    if len(loaded) == 1:  # a path
        return next(iter(loaded.values()))
    raise InputError(f"{name} is a group of tasks; name one of them: {', '.join(loaded)}")


# --------------------------------------------------------------------------- splits: nothing is chosen by the test


def split_parts(split: str) -> list[str]:
    """Return the parts of an expression such as `fold0+fold1[:50%]`: splits and slices of splits."""
    return [part.strip() for part in split.split("+")]


def split_names(split: str) -> list[str]:
    """Return the names of the splits in an expression, in order."""
    return [re.split(r"[\[(]", part, maxsplit=1)[0].strip() for part in split_parts(split)]


def scored_splits(task: Any) -> list[str]:
    """Return the names of the split that a loaded task scores: its test split, or its validation split without one.

    In a task of this package the split has two names: lm-eval's, and that in the data set (`prune_test`).
    """
    arguments = task.get_config("dataset_kwargs") or {}
    own = arguments.get("prune_test", "test") if "prune_data" in arguments else None
    names = {task.get_config("test_split") or task.get_config("validation_split"), own}
    return sorted(str(name) for name in names if name)


def unnamed_exemplar_split(task: Any) -> str | None:
    """Return the split from which lm-eval draws the exemplars of a task that does not name one; else None."""
    config = task.get_config("fewshot_config") or {}
    values = config if isinstance(config, dict) else vars(config)  # lm-eval 0.4.13 has made it an object
    if task.get_config("fewshot_split") or values.get("split") or values.get("samples"):
        return None
    return task.get_config("training_split") or task.get_config("validation_split")


def warn_of_scored_splits(source: str, task: str, splits: Iterable[str], scored: Iterable[str], remedy: str) -> None:
    """Warn, in a line for each, of splits that a task scores and that a source of pruning has questions of.

    Args:
        source: what was computed from the questions, as the subject of the line.
        task: name of the task.
        splits: of the source's questions, or expressions of `tasks.data.load`.
        scored: what `scored_splits` returns.
        remedy: end of the line.
    """
    for split in sorted({name for expression in splits for name in split_names(expression)} & {*scored}):
        logger.warning(
            "%s has questions of the split %s, which %s scores: what is pruned is chosen on the test; %s",
            source, split, task, remedy
        )  # fmt: skip


# --------------------------------------------------------------------------- code

_LIBRARY = Path(inspect.__file__).resolve().parent
_PACKAGE = Path(lmeval_prune.__path__[0]).resolve()
_OWN = [Path(__file__).resolve().parent, _PACKAGE / "scoring"]


def code_digest(task: Any, settings: dict[str, Any], own: bool = True) -> str:
    """Return a digest of the YAML and Python files beside the code of a task, with functions in its `settings`; or "".

    With `own`, all files of this package's tasks and scoring are among them if the task uses any.
    """
    sources = {source for source in _sources([settings, *type(task).__mro__]) if source.is_file()}
    folders = {source.parent for source in sources if not any(map(source.is_relative_to, [_PACKAGE, *_OWN]))}
    files = {file for folder in folders for file in folder.iterdir() if file.suffix in (".py", ".yaml")}
    if own and ("prune_" in repr(settings) or any(b"lmeval_prune" in source.read_bytes() for source in sources)):
        files |= {file for folder in _OWN for file in folder.rglob("*") if file.suffix in (".py", ".yaml")}
    return files_digest(files) if files else ""


def _sources(value: Any) -> Iterator[Path]:
    """Yield the files of functions and classes that are not those of an installed package."""
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _sources(item)
    elif callable(value):
        function = inspect.unwrap(getattr(value, "func", value))
        with suppress(TypeError, OSError):  # of built-in code
            path = Path(inspect.getfile(function if hasattr(function, "__qualname__") else type(function))).resolve()
            if not {"site-packages", "dist-packages"} & set(path.parts) and not path.is_relative_to(_LIBRARY):
                yield path
