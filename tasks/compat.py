"""Parts of lm-eval 0.4: requests, and what it keeps in private attributes of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance


class LoadedTasks:
    """A task manager for `simple_evaluate` that has tasks already loaded."""

    def __init__(self, tasks: dict[str, Any]) -> None:
        self.tasks = tasks
        self.task_index: dict[str, Any] = {}  # lm-eval logs the file of a task from it

    def load(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the named tasks."""
        return {"tasks": {name: self.tasks[name] for name in names}, "groups": {}, "group_map": {}}


def filters(task: Any) -> list[Any]:
    """Return the filters of a task: objects with a name that are applied to requests."""
    return list(getattr(task, "_filters", ()))


def metrics(task: Any) -> list[tuple[str, Any, dict[str, Any]]]:
    """Return the name, function and arguments of each metric of a task."""
    arguments = getattr(task, "_metric_fn_kwargs", {})
    return [(name, function, arguments[name]) for name, function in getattr(task, "_metric_fn_list", {}).items()]


def request(
    kind: str, arguments: tuple[Any, ...], task: str, doc_id: int, repeats: int = 1, doc: Any = None, **fields: Any
) -> Instance:
    """Return a request as lm-eval builds it."""
    from lm_eval.api.instance import Instance

    return Instance(kind, {} if doc is None else doc, arguments, idx=0, metadata=(task, doc_id, repeats), **fields)
