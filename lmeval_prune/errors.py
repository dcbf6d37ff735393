"""User errors, each printed as one line that names the problem and the fix, without a traceback."""

from __future__ import annotations

import difflib
import errno
import functools
import os
import re
import sys
import sysconfig
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
SHOWN = 4  # further places of a mistake that a message names


class InputError(ValueError):
    """A user's mistake. The message is one line that names the problem and the fix.

    Attributes:
        problem: the message; without the fix, if that is given as `remedy`.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem


class BusyError(InputError):
    """An output that another process or thread is writing."""


class DiskError(InputError):
    """A file that cannot be written because the disk is full or read-only. The run can be resumed."""


def with_others(message: str, others: Sequence[str]) -> str:
    """Add the places of further mistakes to the message of the first: some of them, and their number."""
    return f"{message} (also wrong: {first_few(others, most=SHOWN)})" if others else message


def check_exists(path: str | os.PathLike[str], *, file: bool = False) -> None:
    """Refuse a path that does not exist; with `file`, also a folder."""
    if not os.path.exists(path):  # noqa: PTH110 - also of a name that is too long
        raise InputError(f"no such file: {path}{similar_path(path)}")
    if file and Path(path, "config.json").is_file():
        raise InputError(f"{path} is a folder with a checkpoint; give it as pretrained=, or name a file")
    if file and not Path(path).is_file():
        raise InputError(f"{path} is a folder; name a file in it")


def refuse_file(path: str | os.PathLike[str], purpose: str = "") -> None:
    """Refuse an output folder that is a file; `purpose` ends the message, e.g. ` for the router`."""
    if Path(path).is_file():
        raise InputError(f"{path} is a file; name a folder{purpose}")


def similar_path(path: str | os.PathLike[str]) -> str:
    """Return `; did you mean 'FOLDER/NAME'?` for the neighbour of a missing path with the most similar name, if any."""
    path = Path(path)
    try:
        neighbours = [neighbour.name for neighbour in path.expanduser().parent.iterdir()]
    except (OSError, ValueError, RuntimeError):  # no folder, no path, or no home
        return ""
    match = closest_match(path.name, neighbours, 0.7)
    return f"; did you mean {str(path.with_name(match))!r}?" if match else ""


_RETRY = "and run the same command again"
_DISK_REMEDIES = {
    errno.ENOSPC: f"no space left on device; free some space {_RETRY}",
    errno.EDQUOT: f"the disk quota is used up; free some space {_RETRY}",
    errno.EROFS: f"the file system is read-only; make it writable {_RETRY}",
}


def disk_error(error: BaseException, path: object) -> DiskError | None:
    """Convert the error of a full or read-only disk to a `DiskError`; return None for any other error.

    `path` names the file in the message if the error has no file name. Rust libraries (safetensors, tokenizers) put the
    error number into the message.
    """
    if isinstance(error, DiskError):
        return error
    number = getattr(error, "errno", None) if isinstance(error, OSError) else None
    if in_message := re.search(r"\(os error (\d+)\)", str(error)):
        number = int(in_message[1])
    file = getattr(error, "filename", None) or path
    if "/.lmeval-prune-" in str(file):  # a temporary file; name the file that it would replace
        file = path
    return DiskError(f"{file} cannot be written: {_DISK_REMEDIES[number]}") if number in _DISK_REMEDIES else None


@contextmanager
def report_write_errors(path: object) -> Iterator[None]:
    """Convert errors of writing `path` to an `InputError`, or to a `DiskError` if the disk accepts no files."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if full_disk := disk_error(error, path):
            raise full_disk from error
        if not isinstance(error, OSError):
            raise
        if error.errno in (errno.EACCES, errno.EPERM):
            raise DiskError(f"{path} cannot be written: permission denied; name a writable path") from error
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error


def first_line(error: BaseException, length: int = 150) -> str:
    """Return an exception's type and the first line of its message, with the second one if that ends in a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {brief(text, length)}" if text else type(error).__name__


def _user_line(error: BaseException) -> str:
    """Return the line of a user's own code that an exception comes from; empty if only installed packages ran."""
    installed = (sysconfig.get_path("stdlib"), str(Path(__file__).parent))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)  # packages can be those of a user or of another environment
        is_package = {"site-packages", "dist-packages"} & set(file.parts) or frame.filename.startswith(installed)
        if file.is_absolute() and not is_package:
            return f"line {frame.lineno} of {frame.filename}"
    return ""


def _missing_split(error: BaseException) -> str:
    """Return which split a data set of `datasets` lacks, and which it has; empty for another error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    data = frame.f_locals.get("self")
    if not isinstance(error, KeyError) or type(data).__name__ not in ("DatasetDict", "IterableDatasetDict"):
        return ""
    return f"its data have no split {error.args[0]!r}; they have {first_few(data or ())}"


def brief(text: str, length: int) -> str:
    """Return a text in one line of at most `length` characters; a longer one is cut after a word and ends in `…`."""
    text = " ".join(text.split())
    if len(text) <= length:
        return text
    words, space, _ = text[: length - 1].rpartition(" ")
    return f"{words} …" if space else f"{text[: length - 1]}…"


def first_few(names: Iterable[object], none: str = "none", most: int = 8) -> str:
    """Join the first `most` names with commas, and add the total if there are more; return `none` for no names."""
    texts = [str(name) for name in names]
    return (", ".join(texts[:most]) + (f", … ({len(texts)} in all)" if len(texts) > most else "")) or none


def yaml_error_text(error: Exception) -> str:
    """Return the problem in a YAML file with its line and column."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if not problem or mark is None:
        return str(error).splitlines()[0]
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def closest_match(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to a misspelt one; None if none is similar."""
    return next(iter(difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean 'NAME'?` for the end of a message; empty if no known name is similar."""
    match = closest_match(name, candidates, cutoff)
    return f"; did you mean {match!r}?" if match is not None else ""


def check_known(setting: str, name: str, valid_names: Iterable[str]) -> None:
    """Raise `InputError` for a value of a setting that is none of the known names."""
    names = list(valid_names)
    if name not in names:
        raise InputError(f"{setting}={name!r} is not known; use {', '.join(names)}{did_you_mean(name, names)}")


def unknown_task_error(names: Iterable[str], task_names: Iterable[str]) -> InputError:
    """Return the error for tasks that do not exist."""
    names = list(names)
    hint = did_you_mean(names[0], task_names) if len(names) == 1 else ""
    return InputError(
        f"there is no task {', '.join(names)} (`lm_eval ls tasks` lists them; of your own, name the YAML file, or its "
        f"folder by --include_path){hint}"
    )


@contextmanager
def loading_tasks(tasks: Iterable[Any]) -> Iterator[None]:
    """Raise an `InputError` for any error of a block that loads tasks: of their YAML, their functions or their data.

    `tasks` are names, or lm-eval's configurations.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # data set loaders and functions of tasks raise many types
        names = first_few(task.get("task") if isinstance(task, dict) else task for task in tasks)
        text = yaml_error_text(error) if getattr(error, "problem_mark", None) else first_line(error)
        text, line = _missing_split(error) or text, _user_line(error)
        raise InputError(f"{names} cannot be loaded ({text}{line and f', {line}'})") from error


# The options that name a class of another package, or one that derives from it, by `MODULE:CLASS`
CLASSES: defaultdict[str, set[str]] = defaultdict(set)


def note_class(error: BaseException) -> bool:
    """Add a note to an error in a class of another package: the class, and what named it; return whether it is one.

    A function of its package, as a hook can be, counts as the class if this package has called it.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}" for frame in frames]
    for number, name in reversed([*enumerate(names)]):
        is_called = any(caller.startswith("lmeval_prune.") for caller in names[:number])
        beside = [path for path in CLASSES if is_called and _package_of(path) == _package_of(name)]
        if path := next((path for path in CLASSES if name.startswith(f"{path}.")), None):
            note = f"in {path}, which {_options_of([path])} names"
        elif beside:
            note = f"in {name}, beside a class that {_options_of(beside)} names"
        else:
            continue
        if note not in notes_of(error):
            error.add_note(note)
        return True
    return False


def _package_of(path: str) -> str:
    """Return the outermost package of an import path, `MODULE:NAME`."""
    return path.partition(":")[0].partition(".")[0]


def _options_of(paths: Iterable[str]) -> str:
    return " or ".join(sorted(set().union(*(CLASSES[path] for path in paths))))


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an error."""
    return list(getattr(error, "__notes__", ()))


def print_input_errors(function: F) -> F:
    """Decorate a function that lm-eval calls: an uncaught `InputError` is printed as one line.

    An error in a class of another package gets a note of it; see `note_class`.

    Python programs can still catch the error: only `sys.excepthook`, which prints uncaught errors, is replaced.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except InputError:
            if not getattr(sys.excepthook, "_lmeval_prune", False):
                sys.excepthook = _input_error_hook(sys.excepthook)
            raise
        except Exception as error:
            note_class(error)
            raise

    return wrapper  # type: ignore[return-value]


def _input_error_hook(previous: Callable[..., Any]) -> Callable[..., Any]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, InputError):
            print(f"lmeval-prune: error: {error}", file=sys.stderr)
        else:
            previous(kind, error, trace)

    hook._lmeval_prune = True  # type: ignore[attr-defined]
    return hook
