"""Digests of the code that a task's prompts and scores depend on."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval

import lmeval_prune
from lmeval_prune import scoring, tasks
from lmeval_prune.artefacts import files_digest


def code_digest(task: Any, settings: dict[str, Any]) -> str:
    """Return a digest of a task's code that does not depend on where the code is stored.

    It covers the files of the task's functions and classes and the files that these import from the same folders. If
    they import this package, it covers all code of the package's tasks and scoring, with the word lists. Other packages
    count by their versions. `settings` is the task's configuration, with functions among the values.
    """
    return files_digest(_files_of([*_callables(settings), *_classes(task)]))


def user_code_digest(task: Any, settings: dict[str, Any]) -> str:
    """Return a digest of a task's code that is neither of this package nor of lm-eval; empty without.

    Theirs counts by the versions of their tasks.
    """
    packages = [
        *_package_folders(),
        *(Path(str(package.__file__)).resolve().parent for package in (lmeval_prune, lm_eval)),
    ]
    classes = [kind for kind in _classes(task) if kind.__module__ not in sys.stdlib_module_names]
    files = _files_of([*_callables(settings), *classes])
    files = {path for path in files if not any(map(path.is_relative_to, packages))}
    return files_digest(files) if files else ""


def _classes(task: Any) -> list[type]:
    """Return the classes of a task, without those of lm-eval that all tasks have."""
    return [kind for kind in type(task).__mro__ if not _is_harness(kind.__module__)]


def _files_of(values: Iterable[Any]) -> set[Path]:
    """Return the files of functions and classes, and the files that these import."""
    sources = {path for value in values if (path := _source(value))}
    return set().union(*(_with_imports(path, path.stat().st_mtime_ns) for path in sources))


def _package_folders() -> list[Path]:
    """Return the folders of this package's tasks and scoring."""
    return [Path(root).resolve() for package in (scoring, tasks) for root in package.__path__]


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
        files |= {file for root in _package_folders() for file in root.rglob("*.py")}
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
