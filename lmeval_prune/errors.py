"""User errors, each printed as one line that names the problem and the fix, without a traceback."""

from __future__ import annotations

import difflib
import errno
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class InputError(ValueError):
    """A user's mistake: one line that names the problem and the fix; `problem` lacks the fix given as `remedy`."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem


class DiskError(InputError):
    """A file that cannot be written because the disk is full or read-only. The run can be resumed."""


def check_exists(path: str | os.PathLike[str], *, file: bool = False) -> None:
    """Refuse a path that does not exist; with `file`, also a folder."""
    if not os.path.exists(path):  # noqa: PTH110 - also of a name that is too long
        raise InputError(f"no such file: {path}")
    if file and Path(path).is_dir():
        raise InputError(f"{path} is a folder; name a file in it")


def disk_error(error: BaseException, path: object) -> DiskError | None:
    """Convert the error of a full or read-only disk, which names no file or `path`, to a `DiskError`; else None.

    Rust libraries (safetensors, tokenizers) put the error number into the message.
    """
    if isinstance(error, DiskError):
        return error
    in_message = re.search(r"\(os error (\d+)\)", str(error))
    number = int(in_message[1]) if in_message else error.errno if isinstance(error, OSError) else None
    file = getattr(error, "filename", None) or path
    if "/.lmeval-prune-" in str(file):  # a temporary file; name the file that it would replace
        file = path
    reason = f"{os.strerror(number or 0).lower()}; mend that and run the same command again"
    return DiskError(f"{file} cannot be written: {reason}") if number in _FULL_DISK else None


@contextmanager
def report_write_errors(path: object, full_disk_only: bool = False) -> Iterator[None]:
    """Convert errors of writing `path` to an `InputError`, or to a `DiskError` if the disk accepts no files."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if full_disk := disk_error(error, path):
            raise full_disk from error
        if full_disk_only or not isinstance(error, OSError):
            raise
        kind = DiskError if error.errno in (errno.EACCES, errno.EPERM) else InputError
        raise kind(f"{path} cannot be written: {error.strerror or error}") from error


def first_line(error: BaseException, length: int = 150) -> str:
    """Return an exception's type and the first line of its message, with the second one if that ends in a colon."""
    lines = str(error).strip().splitlines()
    text = brief(" ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]), length)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def brief(text: str, length: int) -> str:
    """Return a text in one line of at most `length` characters; a longer one ends in `…`."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 1]}…"


def first_few(names: Iterable[object], none: str = "none", most: int = 8) -> str:
    """Join the first `most` names with commas, and add the total if there are more; return `none` for no names."""
    texts = [str(name) for name in names]
    return (", ".join(texts[:most]) + (f", … ({len(texts)} in all)" if len(texts) > most else "")) or none


def did_you_mean(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean 'NAME'?` for the end of a message; empty if no known name is similar."""
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def print_input_errors(function: F) -> F:
    """Decorate a function that lm-eval calls: an uncaught `InputError` is printed as one line.

    Python programs can still catch the error: only `sys.excepthook`, which prints uncaught errors, is replaced.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except InputError:
            if getattr(sys.excepthook, "func", None) is not _print_input_error:
                sys.excepthook = functools.partial(_print_input_error, sys.excepthook)
            raise

    return wrapper  # type: ignore[return-value]


def _print_input_error(otherwise: Callable[..., Any], kind: type, error: BaseException, trace: Any) -> None:
    if isinstance(error, InputError):
        print(f"lmeval-prune: error: {error}", file=sys.stderr)
    else:
        otherwise(kind, error, trace)
