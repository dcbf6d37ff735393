"""Short digests of JSON values, files and folders."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def digest(value: Any) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def without_addresses(text: str) -> str:
    """Return the text of a Python object without addresses in memory, which differ in each process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def content_digest(path: str | os.PathLike[str]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a file, or of a folder's file names and contents.

    Names that begin with a dot (locks, temporary files) and the location of the file or folder are ignored.
    """
    path = Path(path)
    if path.is_dir():
        files = [(file.relative_to(path).as_posix(), file) for file in sorted(path.rglob("*")) if file.is_file()]
        return digest([[name, content_digest(file)] for name, file in files if not re.search(r"(^|/)\.", name)])
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def files_digest(paths: Iterable[Path]) -> str:
    """Return a digest of files by their names and contents; their folders are ignored."""
    return digest(sorted([path.name, content_digest(path)] for path in paths))
