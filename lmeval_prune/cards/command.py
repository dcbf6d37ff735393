"""Remember the command line of this process, which model cards repeat."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_words: ContextVar[tuple[str, ...]] = ContextVar("command", default=())
# the folders of an absolute path, which begins a word or follows `=`, `,` or `:`
_FOLDERS = re.compile(r"(?<![^=,:])(?:~|[A-Za-z]:)?[/\\](?:[^/\\=,:]*[/\\])*(?=[^/\\=,:])")


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
    words = [word if "://" in word else _FOLDERS.sub("", word) for word in _words.get()]
    return shlex.join(["lmeval-prune", *words]) if words else ""
