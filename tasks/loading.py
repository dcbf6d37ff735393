"""Loading of lm-eval tasks by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lmeval_prune.errors import InputError, brief, did_you_mean, first_few, first_line

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


_included: ContextVar[str | None] = ContextVar("include_path", default=None)


@contextmanager
def including(folder: str | None) -> Iterator[None]:
    """Let each `task_manager` have the tasks of a user's folder, too; None: no other folder."""
    if folder is not None and not Path(folder).is_dir():
        raise InputError(f"include_path={folder} is no folder; name the one with the YAML files of your tasks")
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
    if not names:
        raise InputError("there is no task to run; name one (`lm_eval ls tasks` lists them)")
    if unknown := [name for name in names if not Path(name).is_file() and name not in manager._index]:
        raise InputError(f"{unknown_task_error(unknown, manager.all_tasks)}{broken_file(included_folder())}")


def broken_file(folder: str | None) -> str:
    """Return the end of a message that names a folder's first YAML file with a mistake: lm-eval leaves it out."""
    from lm_eval.tasks._yaml_loader import load_yaml

    for path in sorted(Path(folder).rglob("*.yaml")) if folder else ():
        try:
            if isinstance(yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader), yaml.MappingNode):
                load_yaml(path, resolve_func=False)  # with the files that it includes
        except FileNotFoundError as error:
            return f"; {path} is left out: it includes {error.filename}, which does not exist"
        except (yaml.YAMLError, ValueError, OSError, TypeError) as error:  # a ValueError: no text, or a circle
            source = Path(getattr(getattr(error, "problem_mark", None), "name", path))
            included = f"{source}, " if source.is_file() and source != path else ""
            return f"; {path} is left out: {included}{brief(str(error), 300)}"
    return ""


def unknown_task_error(names: Sequence[str], task_names: Iterable[str]) -> InputError:
    """Return the error for tasks that do not exist."""
    hint = did_you_mean(names[0], task_names) if len(names) == 1 else ""
    return InputError(
        f"there is no task {', '.join(names)} (`lm_eval ls tasks` lists them; of your own, name the YAML file, or its "
        f"folder by --include_path){hint}"
    )


@contextmanager
def loading_tasks(tasks: Iterable[Any]) -> Iterator[None]:
    """Raise an `InputError` for any error of a block that loads tasks, given by names or lm-eval's configurations."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # data set loaders and functions of tasks raise many types
        names = first_few(task.get("task") if isinstance(task, dict) else task for task in tasks)
        raise InputError(f"{names} cannot be loaded ({first_line(error, 300)})") from error


def load_tasks(manager: TaskManager, names: Sequence[str]) -> dict[str, Any]:
    """Load tasks, and the tasks of groups and tags, by name; a name can be the path of a YAML file.

    Raises:
        InputError: a task does not exist, or its data cannot be loaded.
    """
    check_task_names(manager, names)
    with loading_tasks(names):
        tasks: dict[str, Any] = manager.load(list(names))["tasks"]
    return tasks


def load_task(manager: TaskManager, name: str) -> Any:
    """Load one task by its name or the path of its file; `InputError` if it is a group."""
    tasks = load_tasks(manager, [name])
    if name in tasks:
        return tasks[name]
    if len(tasks) == 1:  # a path
        return next(iter(tasks.values()))
    raise InputError(f"{name} is a group of tasks; name one of them: {', '.join(tasks)}")
