"""Requests and loaded tasks as lm-eval 0.4 has them."""

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
        return {"tasks": {name: self.tasks[name] for name in names}, "groups": {}, "group_map": {}}


def request(
    kind: str, arguments: tuple[Any, ...], task: str, doc_id: int, repeats: int = 1, doc: Any = None, **fields: Any
) -> Instance:
    """Return a request as lm-eval builds it."""
    from lm_eval.api.instance import Instance

    return Instance(kind, {} if doc is None else doc, arguments, idx=0, metadata=(task, doc_id, repeats), **fields)
