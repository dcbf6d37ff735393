"""Tasks of lm-eval by their names."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_prune.errors import InputError, first_line, nearest

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


def task_manager(names: Sequence[str], metadata: Mapping[str, Any] | None = None) -> TaskManager:
    """Return a task manager that can load these tasks.

    lm-eval's own index is read only if a name needs it, once in a process: it takes about 15 seconds of CPU time.

    Args:
        names: of tasks, groups or tags, or paths of their YAML files.
        metadata: passed to the tasks.
    """
    from lm_eval.tasks import TaskManager

    folder = Path(__file__).resolve().parent
    ours = TaskManager(include_path=[folder], include_defaults=False, metadata=dict(metadata or {}))
    if all(_is_complete(ours, name) for name in names):
        return ours
    everything = copy.copy(_full_manager())
    everything.metadata, everything._factory = ours.metadata, ours._factory
    return everything


@cache
def _full_manager() -> TaskManager:
    """Read lm-eval's index of tasks and ours."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=[Path(__file__).resolve().parent])


def _is_complete(manager: TaskManager, name: str) -> bool:
    """Return whether a task manager can load a task, or a group with all its members."""
    from lm_eval.tasks._index import Kind, TaskIndex

    entry = manager.task_index.get(name) or TaskIndex.entry_from_path(Path(name))
    if entry is None or entry.kind is not Kind.GROUP:
        return entry is not None
    members = (entry.cfg or {}).get("task") or [""]
    return all(
        _is_complete(manager, member if isinstance(member, str) else member.get("task", "")) for member in members
    )


def load_tasks(manager: TaskManager, names: Sequence[str]) -> dict[str, Any]:
    """Load tasks, and the tasks of groups.

    Args:
        manager: lm-eval's.
        names: of tasks, groups or tags, or paths of their YAML files.

    Returns:
        Tasks by name.

    Raises:
        InputError: there is none of a name, or its data cannot be loaded.
    """
    unknown = [name for name in names if name not in manager.all_tasks and not Path(name).is_file()]
    if unknown or not names:
        meant = nearest(unknown[0], manager.all_tasks) if len(unknown) == 1 else ""
        raise InputError(f"there is no task {', '.join(unknown) or 'to run'}{meant}; `lm_eval ls tasks` lists them")
    try:
        found: dict[str, Any] = manager.load(list(names))["tasks"]
    except InputError:
        raise
    except Exception as error:  # whatever a data set's loader raises
        raise InputError(f"{', '.join(names)} cannot be loaded ({first_line(error)})") from error
    return found


def load_task(manager: TaskManager, name: str) -> Any:
    """Load one task, by its name or its file's path.

    Raises:
        InputError: there is none, its data cannot be loaded, or the name is a group's.
    """
    found = load_tasks(manager, [name])
    if name in found:
        return found[name]
    if len(found) == 1:  # a path
        return next(iter(found.values()))
    raise InputError(f"{name} is a group of tasks; name one of them: {', '.join(found)}")
