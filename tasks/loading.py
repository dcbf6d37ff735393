"""Tasks by name: how they are loaded, and a digest of their code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmeval_prune
from lmeval_prune.artefacts import files_digest
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
    return dict(manager.load(list(names))["tasks"])


def load_task(manager: TaskManager, name: str) -> Any:
    """Load one task by its name or the path of its file; `InputError` if it is a group."""
    loaded = load_tasks(manager, [name])
    if name in loaded:
        return loaded[name]
    if len(loaded) == 1:  # a path
        return next(iter(loaded.values()))
    raise InputError(f"{name} is a group of tasks; name one of them: {', '.join(loaded)}")


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
