"""Errors of users, each printed as one line that names the problem and the fix, not as a traceback."""

from __future__ import annotations

import difflib
import errno
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class InputError(ValueError):
    """A mistake of the user's. The message is one line: what is wrong, what to do."""


class DiskError(InputError):
    """No file can be written, whatever is run: no fault of what is being computed, which can go on afterwards."""


_AGAIN = "and run the same command again"
_FULL = {
    errno.ENOSPC: f"no space left on device; free some space {_AGAIN}",
    errno.EDQUOT: f"the disk quota is used up; free some space {_AGAIN}",
    errno.EROFS: f"the file system is read-only; make it writable {_AGAIN}",
}
_CLOSED = dict.fromkeys((errno.EACCES, errno.EPERM), "permission denied; name a place that can be written")


def disk_error(error: BaseException, path: object) -> DiskError | None:
    """Return what to say where an error means that a disk takes no file; None for any other error.

    Args:
        error: of any library; those in Rust (safetensors, tokenizers) name the system's number in their message.
        path: what was being written, where the error does not say.
    """
    if isinstance(error, DiskError):
        return error
    number = getattr(error, "errno", None) if isinstance(error, OSError) else None
    named = re.search(r"\(os error (\d+)\)", str(error))
    number = int(named[1]) if named else number
    where = getattr(error, "filename", None) or path
    where = path if "/.lmeval-prune-" in str(where) else where  # where it grows
    return DiskError(f"{where} cannot be written: {_FULL[number]}") if number in _FULL else None


@contextmanager
def report_write_errors(path: object) -> Iterator[None]:
    """Say in one line what keeps a block from writing `path`.

    Raises:
        DiskError: no file can be written there.
        InputError: this one cannot.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if refusal := disk_error(error, path):
            raise refusal from error
        if not isinstance(error, OSError):
            raise
        if error.errno in _CLOSED:
            raise DiskError(f"{path} cannot be written: {_CLOSED[error.errno]}") from error
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error


def first_line(error: BaseException, length: int = 150) -> str:
    """Return an exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:length]}" if lines else type(error).__name__


def first_few(names: Iterable[object], none: str = "none", most: int = 8) -> str:
    """Return names with commas, the first of many; `none` if there are no names."""
    texts = [str(name) for name in names]
    return (", ".join(texts[:most]) + (f", … ({len(texts)} in all)" if len(texts) > most else "")) or none


def yaml_error_text(error: Exception) -> str:
    """Return what is wrong with a YAML file, and where."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if not problem or mark is None:
        return str(error).splitlines()[0]
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def closest_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that was probably meant; None if none is near."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a question after the known name that was meant, for the end of a message; empty if none is near."""
    meant = closest_match(name, known, cutoff)
    return f"; did you mean {meant!r}?" if meant is not None else ""


def unknown_task_error(names: Iterable[str], known: Iterable[str]) -> InputError:
    """Return the refusal of tasks that there are not, with the name that was meant if it is only one."""
    first, *others = names = list(names)
    meant = "" if others else did_you_mean(first, known)
    return InputError(f"there is no task {', '.join(names)} (`lm_eval ls tasks` lists them){meant}")


def print_input_errors(function: F) -> F:
    """Decorate what lm-eval calls: an `InputError` that nobody catches is printed as one line.

    Programs can catch the error as usual (it is a `ValueError`). Only when it has left `function` is
    `sys.excepthook` changed, and then only for this type of error.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except InputError:
            if not getattr(sys.excepthook, "_lmeval_prune", False):
                sys.excepthook = _one_line(sys.excepthook)
            raise

    return wrapper  # type: ignore[return-value]


def _one_line(previous: Callable[..., Any]) -> Callable[..., Any]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, InputError):
            print(f"lmeval-prune: error: {error}", file=sys.stderr)
        else:
            previous(kind, error, trace)

    hook._lmeval_prune = True  # type: ignore[attr-defined]
    return hook
