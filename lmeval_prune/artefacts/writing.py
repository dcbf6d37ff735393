"""Atomic writes of files, folders and JSON artefacts."""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from lmeval_prune import __version__
from lmeval_prune.artefacts.locks import TEMPORARY_PREFIX, in_folder, output_lock, temporary_folder
from lmeval_prune.errors import InputError, disk_error, report_write_errors

CREATED_BY = f"lmeval-prune {__version__}"
ENVELOPE = ("schema", "schema_version", "created_by")  # fields of every artefact
PathLike = str | os.PathLike[str]


def write_artefact(path: PathLike, schema: str, version: int, content: dict[str, Any]) -> None:
    """Write a JSON artefact: `content`, its schema and schema version, and the version of this package."""
    envelope = {"schema": schema, "schema_version": version, "created_by": CREATED_BY, **content}
    write_text(path, json.dumps(envelope, indent=2, ensure_ascii=False) + "\n")


def without_nan(value: Any) -> Any:
    """Return a JSON value with None instead of NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: PathLike, text: str) -> None:
    """Write a text file; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: PathLike, content: bytes) -> None:
    """Write a file atomically: readers see the complete old content or the complete new content."""
    with new_file(path) as temporary, report_write_errors(path):
        temporary.write_bytes(content)


def write_table(path: PathLike, table: Any) -> None:
    """Write an Arrow table as a parquet file atomically."""
    from pyarrow import parquet

    with new_file(path) as temporary, report_write_errors(path):
        parquet.write_table(table, temporary, compression="zstd", row_group_size=16384)


def check_writable(path: PathLike, folder: bool = False) -> None:
    """Raise an `InputError` for an output file (or `folder`) that cannot be written, before the work begins."""
    with _temporary_path(Path(path).resolve() if folder else Path(path), folder):
        pass


@contextmanager
def new_file(path: PathLike) -> Iterator[Path]:
    """Write a large file atomically: the file appears when the `with` block ends.

    Yields:
        A temporary path to write to. If the `with` block raises, the old file stays.
    """
    with _temporary_path(Path(path)) as temporary:
        with _report_full_disk(path):
            yield temporary
        with report_write_errors(path):
            _sync(temporary)
            temporary.replace(path)


@contextmanager
def new_folder(path: PathLike, check: Callable[[Path], object] | None = None) -> Iterator[Path]:
    """Write a folder atomically: it appears, or replaces an existing folder, when the `with` block ends.

    The path is locked until then. Where the system cannot exchange two folders in one call, the old folder is renamed
    to `.NAME.before` for a moment. If the process is killed in this moment, the next call restores the old folder.

    Args:
        path: the folder, or a link to it.
        check: called with the path at the beginning and just before the replacement; it raises an error to refuse the
            path.

    Yields:
        A temporary path to write to. If the `with` block raises, the old folder stays.
    """
    path = Path(path).resolve()
    with _temporary_path(path, folder=True) as temporary, output_lock(path):
        if _backup(path).is_dir() and not path.exists():
            _backup(path).replace(path)
        if check:
            check(path)
        with report_write_errors(path):
            temporary.mkdir()
        with _report_full_disk(path):
            yield temporary
        with report_write_errors(path):
            mode = temporary.stat().st_mode & 0o666
            for part in [*temporary.rglob("*"), temporary]:
                if part.is_file():
                    part.chmod(mode)  # safetensors writes files that only their owner can read
                _sync(part)
            if check:
                check(path)
            _replace_folder(temporary, path)


def final_path(temporary: Path) -> Path:
    """Return the final path of a temporary file or folder; other paths are returned unchanged."""
    is_temporary = temporary.parent.name.startswith(TEMPORARY_PREFIX)
    return temporary.parent.with_name(temporary.name) if is_temporary else temporary


def open_append(path: Path) -> IO[str]:
    """Open a text file for appending, but for one behind a symbolic link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")


@contextmanager
def _temporary_path(path: Path, folder: bool = False) -> Iterator[Path]:
    """Yield a path with the name of `path` in a temporary folder of this process, next to `path`."""
    with ExitStack() as stack:
        with report_write_errors(path):
            if path.exists() and path.is_dir() != folder:
                raise InputError(f"{path} is a {'file' if folder else 'folder'}; name another output")
            parent = path.parent.absolute()
            temporary = stack.enter_context(in_folder(parent, lambda: temporary_folder(parent)))
        yield temporary / path.name


@contextmanager
def _report_full_disk(path: PathLike) -> Iterator[None]:
    """Raise a `DiskError` instead of the error that a full disk causes in the block."""
    try:
        yield
    except Exception as error:
        if full_disk := disk_error(error, path):
            raise full_disk from error
        raise


def _replace_folder(temporary: Path, path: Path) -> None:
    if not path.exists() or not any(path.iterdir()):
        temporary.replace(path)
    elif not _exchange(temporary, path):  # rename twice; in between, the path does not exist
        shutil.rmtree(_backup(path), ignore_errors=True)
        path.replace(_backup(path))
        try:
            temporary.replace(path)
        except OSError:
            _backup(path).replace(path)
            raise
        shutil.rmtree(_backup(path))


def _backup(path: Path) -> Path:
    return path.parent / f".{path.name}.before"


def _exchange(path: Path, other: Path) -> bool:
    """Exchange two files or folders in one system call; return False if the system has no such call."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_cwd, rename_exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    return call(at_cwd, os.fsencode(path), at_cwd, os.fsencode(other), rename_exchange) == 0


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
