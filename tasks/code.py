"""A digest of the files that a task's prompts and scores depend on."""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmeval_prune import scoring, tasks
from lmeval_prune.artefacts import files_digest

_LIBRARY = Path(inspect.__file__).resolve().parent
_PACKAGE = Path(scoring.__path__[0]).resolve().parent
_OWN = [Path(root).resolve() for package in (scoring, tasks) for root in package.__path__]


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
