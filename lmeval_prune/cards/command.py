"""Remember the command line of this process, which model cards repeat."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_words: ContextVar[tuple[str, ...]] = ContextVar("command", default=())
# the folders of an absolute path; what stands before it is not a part of a relative path or of a URL
_FOLDERS = re.compile(
    r"(?<![\w.~/\\)\]*-])(?:~\w*|[A-Za-z]:)?(?:/|\\\\?)(?=[^\s/\\])"
    r"""(?:[^/\\=,:+"']*[/\\]+)*(?=[^/\\=,:])"""
)


@contextmanager
def remembered(words: Sequence[str]) -> Iterator[None]:
    """Remember the words of the command line after `lmeval-prune` while it runs."""
    token = _words.set(tuple(words))
    try:
        yield
    finally:
        _words.reset(token)


def command_line() -> str:
    """Return the running command, absolute paths by their last part; empty in a Python program of one's own."""
    words = _words.get()
    return shlex.join(["lmeval-prune", *map(without_folders, words)]) if words else ""


def without_folders(text: str) -> str:
    """Return a text with the absolute paths in it by their last part."""
    return _FOLDERS.sub("", re.sub(r"\bfile:/+", "/", text))
