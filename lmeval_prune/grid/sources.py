"""The code of a task: the files of its functions, those that they import from beside them, and word lists there."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmeval_prune.artefacts import content_digest, digest

# packages whose modules are code of tasks; whatever else is installed counts by its version, if at all
_PACKAGES = ("lmeval_prune.tasks", "lmeval_prune.scoring", "lm_eval.tasks")


def code_digest(task: Any, settings: dict[str, Any]) -> str:
    """A digest of a task's code, wherever it lies.

    Args:
        task: of lm-eval's.
        settings: its configuration, functions among the values.
    """
    own = [*_functions(settings), *(kind for kind in type(task).__mro__ if not _is_the_harness(kind.__module__))]
    waiting = [path for one in own if (path := _file(one))]
    found: dict[Path, str] = {}
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = content_digest(path)
            waiting += _imported(path, path.stat().st_mtime_ns)
    return digest(sorted([path.name, content] for path, content in found.items()))


def _is_the_harness(module: str) -> bool:
    return module == "builtins" or (module.startswith("lm_eval.") and not module.startswith("lm_eval.tasks."))


def _functions(value: Any) -> Iterator[Any]:
    """All functions and classes in a configuration."""
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _functions(inner)
    elif callable(value):
        yield inspect.unwrap(getattr(value, "func", value))


def _file(one: Any) -> Path | None:
    """Where a function or class stands."""
    try:
        path = Path(inspect.getfile(one)).resolve()
    except TypeError:  # built in, or an object that can be called
        return None if one is type(one) or isinstance(one, type) else _file(type(one))
    return path if path.is_file() else None


@lru_cache(maxsize=4096)
def _imported(path: Path, _: int) -> tuple[Path, ...]:
    """Files that a file imports, from beside it or of packages of tasks, and word lists beside it."""
    found: list[Path | None] = []
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [_module(path.parent, one.name) for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1] if node.level else path.parent
            names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)] if node.module else []
            names = names or [one.name for one in node.names]
            found += [_module(folder, name) for name in names if name]
    return (*(one.resolve() for one in found if one), *path.parent.glob("words/*.yaml"))


def _module(folder: Path, name: str) -> Path | None:
    """The file of a module."""
    place = folder / name.replace(".", "/")
    beside = next((one for one in (place.with_suffix(".py"), place / "__init__.py") if one.is_file()), None)
    if beside or not f"{name}.".startswith(tuple(f"{one}." for one in _PACKAGES)):
        return beside
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # a name in a module
        return None
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None
