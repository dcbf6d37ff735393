"""Reading and writing artefacts: whole or not at all, by declared fields, never pickle.

What is written grows beside its path, in a folder of its writer's own, `.lmeval-prune-…`, and takes its name at the
end. The folder's name says which process writes in it. A process that writes in the same place for the first time
removes the folders of processes that have ended, and locks that nobody holds: a kill has left them.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import quote

import psutil
from filelock import FileLock, Timeout

from lmeval_prune import __version__
from lmeval_prune.errors import InputError, disk_error, first_line, writing

logger = logging.getLogger(__name__)
CREATED_BY = f"lmeval-prune {__version__}"
TEMPORARY = ".lmeval-prune-"  # folders that grow, and locks, begin so
_WRITER = re.compile(rf"{re.escape(TEMPORARY)}(?P<system>\w+)-(?P<process>\d+)-(?P<began>\d+)-\w+")
_FORGOTTEN = 7 * 24 * 3600  # seconds after its last write; of a folder whose writer another system knows
_GRACE = 0.2  # seconds; who clears a folder holds its locks for a moment
# what to say of numbers that a model has computed
COMPUTED = "the model computes what its type cannot hold: give its weights in float32 or bfloat16"
_TRIES = 20  # to make a folder
_LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_LONGEST = 200  # bytes of a name; file systems end at 255, and an ending may follow
_LARGEST = 2**28  # bytes of a JSON file
PathLike = str | os.PathLike[str]
T = TypeVar("T")

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
def alone(path: PathLike, timeout: float = _GRACE) -> Iterator[None]:
    """Let no other process, or thread, write a file or folder meanwhile.

    Args:
        path: of the file or folder; it need not be there.
        timeout: seconds to wait for another one; -1: until it ends.

    Raises:
        InputError: one does, or nothing can be written there.
    """
    with ExitStack() as stack:
        with writing(path):
            try:
                target = Path(path).resolve()
                inside = target.is_dir() and not os.access(target.parent, os.W_OK)
                lock = lock_of(target / target.name if inside else target)
                stack.enter_context(_within(lock.parent, lambda: held(lock, timeout, again=True)))
            except Timeout:
                raise InputError(f"another run is writing to {path}; wait for it, or name another output") from None
            except RuntimeError as error:  # a loop of links
                raise InputError(f"{path} cannot be written: {error}") from error
            _clear(lock.parent, os.getpid())
        yield


def lock_of(path: Path) -> Path:
    """Return the path of the lock of a file or folder, which is beside it."""
    return path.parent / f"{TEMPORARY}{file_name(path.name)}.lock"


@contextmanager
def held(path: Path, timeout: float = _GRACE, again: bool = False) -> Iterator[None]:
    """Hold a lock; its file goes with it. Where the file system knows no locks, warn once and go on.

    Args:
        path: of the lock's file.
        timeout: seconds to wait for another process or thread; -1: until it ends.
        again: whether the same thread may hold it already; else any thread may end the block.

    Raises:
        Timeout: another one holds it.
    """
    lock = FileLock(path, is_singleton=again, thread_local=again)
    try:
        lock.acquire(timeout=timeout)
    except OSError as error:
        if error.errno not in _LOCKLESS:
            raise
        _warn_lockless(error.strerror)
    try:
        yield
    finally:
        if lock.lock_counter <= 1:
            path.unlink(missing_ok=True)
        lock.release()


@functools.cache
def _warn_lockless(reason: str) -> None:
    logger.warning("the file system has no locks (%s); let no two commands write the same output at once", reason)


@contextmanager
def _within(folder: Path, block: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
    """Enter a block that needs a folder. It is made; where it was missing and is empty at the end, it goes again."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    with ExitStack() as stack:
        for parent in reversed(missing):
            stack.callback(_remove_empty, parent)
        yield make_folder(folder, lambda: stack.enter_context(block()))


def make_folder(folder: Path, then: Callable[[], T] = lambda: None) -> T:  # type: ignore[assignment,return-value]
    """Make a folder and those above it, and what is to be in it; again, if another process removed it while empty."""
    for left in reversed(range(_TRIES)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return then()
        except (FileNotFoundError, FileExistsError):
            if not left:
                raise
    raise AssertionError


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


# --------------------------------------------------------------------------- what a kill leaves


@functools.lru_cache(maxsize=1024)
def _clear(folder: Path, process: int) -> None:
    """Remove what dead writers have left in a folder; once in a process."""
    for left in folder.glob(f"{TEMPORARY}*"):
        with suppress(Timeout, OSError):
            if left.suffix == ".lock":
                with held(left, timeout=0):
                    pass
            elif os.access(left, os.W_OK) and _is_dead(left):
                shutil.rmtree(left, ignore_errors=True)


def _is_dead(growing: Path) -> bool:
    """Return whether the writer of a folder has ended; of another system's, whether it has long written nothing."""
    writer = _WRITER.fullmatch(growing.name)
    if writer is None or writer["system"] != _system():
        newest = max(part.lstat().st_mtime for part in (growing, *growing.rglob("*")))
        return time.time() - newest > _FORGOTTEN
    try:
        return abs(_began(int(writer["process"])) - int(writer["began"])) > 2
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _began(process: int) -> int:
    """Return when a process began, in seconds after the system did: changes of the clock do not count."""
    boot = psutil.boot_time()
    return round(psutil.Process(process).create_time() - boot)


@functools.cache
def _system() -> str:
    """Return a name of all in which processes are numbered: host, since it began, and container."""
    parts = [platform.node()]
    with suppress(OSError):  # Linux's
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), str(Path("/proc/self/ns/pid").readlink())]
    return digest(parts)[:8]


@functools.lru_cache(maxsize=1)
def _prefix(process: int) -> str:
    return f"{TEMPORARY}{_system()}-{process}-{_began(process)}-"


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
    with new_file(path) as growing, writing(path):
        growing.write_bytes(content)


def check_writable(path: PathLike, folder: bool = False) -> None:
    """Refuse a path that `write_bytes` would refuse, before the work whose result is to be written there.

    Args:
        path: of a file.
        folder: whether it is that of a folder; as `new_folder` then.

    Raises:
        InputError: it cannot be written.
    """
    with _growing(Path(path).resolve() if folder else Path(path), folder):
        pass


@contextmanager
def new_file(path: PathLike) -> Iterator[Path]:
    """Make a large file that appears whole, when the block ends.

    Yields:
        Where to write. If the block raises, what stood at the path stays, and nothing else; what it raises is its own,
        but where the disk is full.

    Raises:
        InputError: it cannot be written.
        DiskError: the disk takes no file.
    """
    with _growing(Path(path)) as growing:
        with _room(path):
            yield growing
        with writing(path):
            _sync(growing)
            growing.replace(path)


@contextmanager
def new_folder(path: PathLike, check: Callable[[Path], object] | None = None) -> Iterator[Path]:
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
        DiskError: the disk takes no file.
    """
    path = Path(path).resolve()
    with _growing(path, folder=True) as growing, alone(path):
        if _before(path).is_dir() and not path.exists():
            _before(path).replace(path)
        if check:
            check(path)
        with writing(path):
            growing.mkdir()
        with _room(path):
            yield growing
        with writing(path):
            mode = growing.stat().st_mode & 0o666
            for part in [*growing.rglob("*"), growing]:
                if part.is_file():
                    part.chmod(mode)  # weights are written for their owner only
                _sync(part)
            if check:
                check(path)
            _replace_folder(growing, path)


def final_path(growing: Path) -> Path:
    """Return the path that a growing file or folder will have; others are returned as they are."""
    return growing.parent.with_name(growing.name) if growing.parent.name.startswith(TEMPORARY) else growing


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
    """Yield a path of the same name in a folder that is this writer's own."""
    with ExitStack() as stack:
        with writing(path):
            if path.is_dir() and not folder:
                raise InputError(f"{path} is a folder; name a file in it")
            if path.is_file() and folder:
                raise InputError(f"{path} is a file; name a folder")
            parent = path.parent.absolute()
            own = stack.enter_context(_within(parent, lambda: _own_folder(parent)))
        yield own / path.name


@contextmanager
def _own_folder(parent: Path) -> Iterator[Path]:
    """Make a folder whose name says who writes in it, and remove it at the end."""
    _clear(parent, os.getpid())
    folder = Path(tempfile.mkdtemp(prefix=_prefix(os.getpid()), dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _room(path: PathLike) -> Iterator[None]:
    """Say in one line that there is no room for what a block writes.

    Raises:
        DiskError: the disk takes no file.
    """
    try:
        yield
    except Exception as error:
        if refusal := disk_error(error, path):
            raise refusal from error
        raise


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


def _exchange(path: Path, other: Path) -> bool:
    """Exchange two names at once, where the system can."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    here, exchange = -100, 2
    return call(here, os.fsencode(path), here, os.fsencode(other), exchange) == 0


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
        name = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise InputError(f"{path} is not a {' or '.join(schemas)} artefact (its schema is {str(name)[:80]!r})")
    number = content.get("schema_version")
    if not isinstance(number, int) or isinstance(number, bool):
        raise InputError(f"{path} is damaged: its schema_version is {str(number)[:40]!r}, not a number")
    if number > version:
        raise InputError(
            f"{path} has schema version {str(number)[:40]}; this lmeval-prune reads up to {version}: upgrade it"
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


def read_table(
    path: PathLike, remedy: str, columns: list[str] | None = None, schema: Any = None, optional: Iterable[str] = ()
) -> Any:
    """Read a parquet file as an Arrow table, and check it whole.

    Args:
        path: of the file.
        remedy: what to do about a damaged file, for the message.
        columns: those that are needed; default all, or those of the schema.
        schema: types that they are cast to.
        optional: columns of the schema that are null where the file lacks them.

    Raises:
        FileNotFoundError: there is no such file.
        InputError: it is damaged.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(path, columns=None if schema else columns)
        table.validate(full=True)  # texts that are no UTF-8, too
        if schema is None:
            return table
        columns = columns or schema.names
        for name in set(optional).intersection(columns).difference(table.column_names):
            table = table.append_column(name, pa.nulls(len(table), schema.field(name).type))
        return table.select(columns).cast(pa.schema([schema.field(name) for name in columns]))
    except FileNotFoundError:
        raise
    except (OSError, KeyError, UnicodeDecodeError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}); {remedy}") from None


def check_finite(tensors: Mapping[str, Any], name: object, remedy: str = "make it again") -> None:
    """Refuse tensors with numbers that are not finite.

    Args:
        tensors: by their names.
        name: of what has them.
        remedy: what to do.

    Raises:
        InputError: naming the first of them.
    """
    for part, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise InputError(f"{name} has NaN or infinite values in {part}; {remedy}")


# --------------------------------------------------------------------------- digests


def digest(value: Any) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def content_digest(path: PathLike) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a file's bytes, or of a folder's files and their names.

    Names that begin with a dot (locks, growing files) do not count, nor does where the file or folder is.
    """
    path = Path(path)
    if path.is_dir():
        named = [(file.relative_to(path).as_posix(), file) for file in sorted(path.rglob("*")) if file.is_file()]
        return digest([[name, content_digest(file)] for name, file in named if not re.search(r"(^|/)\.", name)])
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
