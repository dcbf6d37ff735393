"""Reading and writing JSON artefacts: atomic, versioned, never pickle."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmeval_prune import __version__
from lmeval_prune.errors import InputError, disk_error, writing

CREATED_BY = f"lmeval-prune {__version__}"


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part.

    Raises:
        InputError: the path is a folder, or its folder cannot be made or written.
        DiskError: the disk takes no file.
    """
    path = Path(path)
    handle, temporary = _beside(path)
    try:
        with writing(path), os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with writing(path):
            Path(temporary).chmod(0o666 & ~_umask())
            Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a path that `write_bytes` would refuse, before the work whose result is to be written there.

    Raises:
        InputError: as of `write_bytes`.
    """
    handle, temporary = _beside(Path(path))
    os.close(handle)
    Path(temporary).unlink()


def _beside(path: Path) -> tuple[int, str]:
    """A new file in the same folder."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; name a file in it")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def digest(value: Any) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_artefact(path: str | os.PathLike[str], schema: str, version: int, content: dict[str, Any]) -> None:
    """Write `content` with its schema name and version and the program that made it."""
    envelope = {"schema": schema, "schema_version": version, "created_by": CREATED_BY, **content}
    write_text(path, json.dumps(envelope, indent=2, ensure_ascii=False) + "\n")


def read_artefact(
    path: str | os.PathLike[str], schema: str | tuple[str, ...], version: int
) -> tuple[dict[str, Any], str]:
    """Read an artefact of this schema (or one of these), of this version or older.

    Returns:
        Its content, and the SHA-256 of the bytes that were read.

    Raises:
        InputError: the file is missing, is not JSON (a pickle is refused without being read), is
            another kind of artefact, or is newer than this program.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} is a folder; name a file in it" if path.is_dir() else f"no such file: {path}")
    data = path.read_bytes()
    start = data[:2]
    if start[:1] == b"\x80" or start == b"PK":
        raise InputError(
            f"{path} is a pickle or torch file, which can run code when it is read, and was not read; "
            f"artefacts are JSON (write one with `lmeval-prune mask` or HeadMask.save)"
        )
    try:
        content = json.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    schemas = (schema,) if isinstance(schema, str) else schema
    if not isinstance(content, dict) or content.get("schema") not in schemas:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise InputError(f"{path} is not a {' or '.join(schemas)} artefact (its schema is {found!r})")
    number = content.get("schema_version")
    if not isinstance(number, int) or number > version:
        raise InputError(f"{path} has schema version {number!r}; this lmeval-prune reads up to {version}: upgrade it")
    return content, hashlib.sha256(data).hexdigest()


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a folder that appears whole, when the block ends; one that a killed process left half is made anew.

    Only one process at a time may make a folder of that name.

    Yields:
        Where to write. If the block raises, nothing stays.
    """
    path = Path(path)
    half = path.with_name(f".{path.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    with writing(path):
        half.mkdir(parents=True)
    try:
        yield half
        half.replace(path)
    except Exception as error:
        if refusal := disk_error(error, path):
            raise refusal from error
        raise
    finally:
        shutil.rmtree(half, ignore_errors=True)


@contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a large file that appears whole, when the block ends; one that a killed process left half is made anew.

    Yields:
        Where to write. If the block raises, what stood at the path stays, and nothing else.

    Raises:
        InputError: it cannot be written.
    """
    path = Path(path)
    half = path.with_name(f".{path.name}.half")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield half
            with half.open("rb") as file:
                os.fsync(file.fileno())
            half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def replace_folder(half: Path, folder: Path) -> None:
    """Let a folder take another one's name, and remove that one.

    On systems that cannot exchange two names at once, a kill between two renames leaves the old one beside its place;
    `put_back` gives it its name again.
    """
    if not folder.exists() or not any(folder.iterdir()):
        half.replace(folder)
    elif _exchange(half, folder):
        shutil.rmtree(half)
    else:  # no such call on this system: for a moment there is none
        shutil.rmtree(_before(folder), ignore_errors=True)
        folder.replace(_before(folder))
        try:
            half.replace(folder)
        except OSError:
            put_back(folder)
            raise
        shutil.rmtree(_before(folder))


def put_back(folder: Path) -> None:
    """Give a folder its name again that was moved out of the way, if no other has it."""
    if _before(folder).is_dir() and not folder.exists():
        _before(folder).replace(folder)


def _before(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.before"


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once, where the system can."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    here, exchange = -100, 2
    return call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def content_digest(path: str | os.PathLike[str]) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a file's bytes, or of a folder's files and their names.

    What begins with a dot (locks, halves) does not count, nor does where the file or folder is.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(one for one in path.rglob("*") if one.is_file())
        named = [(one.relative_to(path).as_posix(), one) for one in files]
        return digest([[name, content_digest(one)] for name, one in named if not re.search(r"(^|/)\.", name)])
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
