"""Loading of lm-eval tasks by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_prune.errors import InputError

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


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
