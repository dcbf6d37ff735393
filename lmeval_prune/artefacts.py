"""Reading and writing artefacts: whole or not at all, by declared fields, never pickle.

What is written grows beside its path, in a folder of its writer's own, `.lmeval-prune-…`, and takes its name at the
end. The writer holds a lock in that folder. The next writer in the same place removes those folders that nobody locks:
a kill has left them.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from filelock import FileLock, Timeout

from lmeval_prune import __version__
from lmeval_prune.errors import InputError, disk_error, first_line, writing

CREATED_BY = f"lmeval-prune {__version__}"
_GROWING = ".lmeval-prune-"
_LONGEST = 200  # bytes of a name; file systems end at 255, and an ending may follow
_LARGEST = 2**28  # bytes of a JSON file
PathLike = str | os.PathLike[str]

# --------------------------------------------------------------------------- names and locks


def file_name(name: str) -> str:
    """Return a name (of a task, a variant, …) as the name of a file, which cannot leave its folder.

    Ordinary names stay as they are. Separators, what cannot be printed and a leading dot are written as `%2F`; a long
    name ends in a digest instead.
    """
    text = "".join(
        sign if sign.isprintable() and sign not in "/\\%" else quote(sign, safe="", errors="surrogatepass")
        for sign in name
    )
    text = re.sub(r"^\.", "%2E", text) or "%"
    if len(text.encode()) > _LONGEST:
        text = f"{text.encode()[: _LONGEST - 17].decode(errors='ignore')}~{digest(name)}"
    return text


@contextmanager
def alone(path: PathLike, timeout: float = 0) -> Iterator[None]:
    """Let no other process, or thread, write a file or folder meanwhile.

    Args:
        path: of the file or folder; it need not be there.
        timeout: seconds to wait for another one; -1: until it ends.

    Raises:
        InputError: one does, or nothing can be written there.
    """
    with ExitStack() as stack:
        try:
            target = Path(path).resolve()
            inside = target.is_dir() and not os.access(target.parent, os.W_OK)
            lock = target / ".lock" if inside else target.parent / f".{file_name(target.name)}.lock"
            with writing(path):
                stack.enter_context(_parents(lock))
                try:
                    stack.enter_context(_held(lock, timeout))
                except Timeout:  # an OSError, too
                    message = f"another run is writing to {path}; wait for it, or name another output"
                    raise InputError(message) from None
        except RuntimeError as error:  # a loop of links
            raise InputError(f"{path} cannot be written: {error}") from error
        yield


@contextmanager
def _held(path: Path, timeout: float) -> Iterator[None]:
    """Hold a lock, which the same thread may hold already; its file goes with it."""
    lock = FileLock(path, is_singleton=True)
    with lock.acquire(timeout=timeout):
        try:
            yield
        finally:
            if lock.lock_counter == 1:
                path.unlink(missing_ok=True)


@contextmanager
def _parents(path: Path) -> Iterator[None]:
    """Make the folders above a path; those that are empty at the end go again."""
    missing = [parent for parent in path.absolute().parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()


# --------------------------------------------------------------------------- writing


def write_text(path: PathLike, text: str) -> None:
    """Write a text file; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: PathLike, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part.

    Raises:
        InputError: the path is a folder, or its folder cannot be made or written.
        DiskError: the disk takes no file.
    """
    with new_file(path) as growing:
        growing.write_bytes(content)


def check_writable(path: PathLike) -> None:
    """Refuse a path that `write_bytes` would refuse, before the work whose result is to be written there.

    Raises:
        InputError: as of `write_bytes`.
    """
    with _growing(Path(path)):
        pass


@contextmanager
def new_file(path: PathLike) -> Iterator[Path]:
    """Make a large file that appears whole, when the block ends.

    Yields:
        Where to write. If the block raises, what stood at the path stays, and nothing else.

    Raises:
        InputError: it cannot be written.
        DiskError: the disk takes no file.
    """
    with writing(path), _growing(Path(path)) as growing:
        yield growing
        _sync(growing)
        growing.replace(path)


@contextmanager
def new_folder(path: PathLike, check: Callable[[Path], object] = Path.resolve) -> Iterator[Path]:
    """Make a folder that appears whole, when the block ends, in the place of one that is there.

    On systems that cannot exchange two names at once, a kill between two renames leaves the old one as `.NAME.before`;
    the next call puts it back. Meanwhile no other process makes a folder of that name.

    Args:
        path: of the folder, or of a link to it.
        check: called with the folder, at the beginning and just before it is replaced; it refuses what is not to be.

    Yields:
        Where to write. If the block raises, what stood at the path stays, and nothing else.

    Raises:
        InputError: it cannot be made, or another process is making it.
    """
    path = Path(path).resolve()
    with alone(path), _growing(path, folder=True) as growing:
        if _before(path).is_dir() and not path.exists():
            _before(path).replace(path)
        check(path)
        with writing(path):
            growing.mkdir()
        try:
            yield growing
        except Exception as error:
            if refusal := disk_error(error, path):
                raise refusal from error
            raise
        mode = growing.stat().st_mode & 0o666
        for part in [*growing.rglob("*"), growing]:
            if part.is_file():
                part.chmod(mode)  # weights are written for their owner only
            _sync(part)
        check(path)
        _replace_folder(growing, path)


def final_path(growing: Path) -> Path:
    """Return the path that a growing file or folder will have; others are returned as they are."""
    return growing.parent.with_name(growing.name) if growing.parent.name.startswith(_GROWING) else growing


def append_to(path: Path) -> IO[str]:
    """Open a text file to append to.

    Raises:
        InputError: it is a link, which leads elsewhere.
    """
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InputError(f"{path} is a link, and is not written to; remove it, or name another folder") from None


@contextmanager
def _growing(path: Path, folder: bool = False) -> Iterator[Path]:
    """Yield a path of the same name in a folder that is this writer's own, after removing those of dead writers."""
    with ExitStack() as stack:
        with writing(path):
            if path.is_dir() and not folder:
                raise InputError(f"{path} is a folder; name a file in it")
            if path.is_file() and folder:
                raise InputError(f"{path} is a file; name a folder")
            stack.enter_context(_parents(path))
            for left in path.parent.glob(f"{_GROWING}*"):
                with suppress(Timeout, OSError), FileLock(left / ".lock", timeout=0):
                    shutil.rmtree(left, ignore_errors=True)
            own = _own_folder(path.parent, stack)
        yield own / path.name


def _own_folder(parent: Path, stack: ExitStack) -> Path:
    while True:  # another writer may take it for a dead one's before it is locked
        own = Path(tempfile.mkdtemp(prefix=_GROWING, dir=parent))
        with suppress(Timeout):
            stack.enter_context(FileLock(own / ".lock", timeout=0))
            stack.callback(shutil.rmtree, own, ignore_errors=True)
            return own


def _replace_folder(growing: Path, path: Path) -> None:
    """Let a folder take another one's name, which has its own then, or none."""
    if not path.exists() or not any(path.iterdir()):
        growing.replace(path)
    elif not _exchange(growing, path):  # no such call on this system: for a moment there is none
        shutil.rmtree(_before(path), ignore_errors=True)
        path.replace(_before(path))
        try:
            growing.replace(path)
        except OSError:
            _before(path).replace(path)
            raise
        shutil.rmtree(_before(path))


def _before(path: Path) -> Path:
    return path.parent / f".{path.name}.before"


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once, where the system can."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    here, exchange = -100, 2
    return call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_artefact(path: PathLike, schema: str, version: int, content: dict[str, Any]) -> None:
    """Write `content` with its schema name and version and the program that made it."""
    envelope = {"schema": schema, "schema_version": version, "created_by": CREATED_BY, **content}
    write_text(path, json.dumps(envelope, indent=2, ensure_ascii=False) + "\n")


# --------------------------------------------------------------------------- reading


def read_artefact(
    path: PathLike, schema: str | tuple[str, ...], version: int, fields: Any = dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """Read an artefact of this schema (or one of these), of this version or older.

    Args:
        path: of the file.
        schema: names of schemas.
        version: the newest that can be read.
        fields: type of its content, as of `checked`.

    Returns:
        Its content, and the SHA-256 of the bytes that were read.

    Raises:
        InputError: the file is missing, is not JSON (a pickle is refused without being read), is
            another kind of artefact, is newer than this program, or lacks fields, or has them of other types.
    """
    path = Path(path)
    data = _bytes_of(path)
    content = from_json(data, path)
    schemas = (schema,) if isinstance(schema, str) else schema
    if not isinstance(content, dict) or content.get("schema") not in schemas:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise InputError(f"{path} is not a {' or '.join(schemas)} artefact (its schema is {str(found)[:80]!r})")
    number = content.get("schema_version")
    if not isinstance(number, int) or isinstance(number, bool) or number > version:
        raise InputError(
            f"{path} has schema version {str(number)[:80]}; this lmeval-prune reads up to {version}: upgrade it"
        )
    return checked(content, fields, path), hashlib.sha256(data).hexdigest()


def read_json(path: PathLike, fields: Any = dict[str, Any]) -> Any:
    """Read a JSON file whose value is of a type, as of `checked`.

    Raises:
        InputError: it is missing, is no JSON, or of another type.
    """
    return checked(from_json(_bytes_of(Path(path)), path), fields, path)


def read_lines(path: PathLike, fields: Any = dict[str, Any]) -> list[Any]:
    """Read a file with a JSON value a line, each of a type, as of `checked`.

    Raises:
        InputError: it is missing, a line is no JSON, or its value of another type.
    """
    if not Path(path).is_file():
        raise InputError(f"no such file: {path}")
    lines = Path(path).read_bytes().split(b"\n")
    named = ((line, f"line {number} of {path}") for number, line in enumerate(lines, 1) if line.strip())
    return [checked(from_json(line, name), fields, name) for line, name in named]


def from_json(data: bytes | str, path: object) -> Any:
    """Return the value of a JSON text; numbers of thousands of digits and nesting without end are refused.

    Raises:
        InputError: it is no such text; the message names `path`.
    """
    import pydantic_core

    try:
        return pydantic_core.from_json(data)
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None


def checked(value: Any, kind: Any, path: object) -> Any:
    """Return a value of JSON that is of a type, as pydantic knows types: `list[str]`, a `TypedDict`, ….

    Raises:
        InputError: it is of another one; the message names `path` and the field.
    """
    from pydantic import ValidationError

    try:
        _validator(kind).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"])
        name = f"field {where!a}" if where else "content"
        raise InputError(f"{path} is damaged or of another kind ({name}: {first['msg'].splitlines()[0]})") from None
    return value


@functools.cache
def _validator(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _bytes_of(path: Path) -> bytes:
    if not path.is_file():
        raise InputError(f"{path} is a folder; name a file in it" if path.is_dir() else f"no such file: {path}")
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if data.startswith((b"\x80", b"PK")):
        raise InputError(
            f"{path} is a pickle or torch file, which can run code when it is read, and was not read; "
            f"artefacts are JSON (write one with `lmeval-prune mask` or HeadMask.save)"
        )
    if len(data) > _LARGEST:
        raise InputError(f"{path} is larger than {_LARGEST >> 20} MiB, and no artefact of lmeval-prune's")
    return data


def read_tensors(path: PathLike, sha256: str | None = None) -> dict[str, Any]:
    """Read tensors from a safetensors file.

    Args:
        path: of the file.
        sha256: hash of its content, which an artefact names; None if none does.

    Raises:
        InputError: it cannot be read, is another file, or has numbers that are not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = Path(path).read_bytes()
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise InputError(f"{path} is not the file that the artefact beside it was written with; make both again")
        tensors = load(data)
    except (OSError, SafetensorError, RuntimeError, KeyError) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}); it belongs to the artefact beside it") from None
    check_finite(tensors, path)
    return tensors


def check_finite(tensors: dict[str, Any], path: object) -> None:
    """Refuse tensors with numbers that are not finite.

    Raises:
        InputError: naming the first of them.
    """
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise InputError(f"{path} has numbers in {name} that are not finite; make it again")


# --------------------------------------------------------------------------- digests


def digest(value: Any) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def content_digest(path: PathLike) -> str:
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
