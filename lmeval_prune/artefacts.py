"""Reading and writing artefacts: atomic writes, declared fields, no pickle.

A file or folder is written in a temporary folder `.lmeval-prune-…` beside its path, and renamed when it is complete.
The temporary folder's name identifies the writing process. A process that first writes somewhere removes the leftovers
of a kill: temporary folders of ended processes, and locks that nobody holds.
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
from lmeval_prune.errors import InputError, disk_error, first_line, report_write_errors

logger = logging.getLogger(__name__)
CREATED_BY = f"lmeval-prune {__version__}"
TEMPORARY_PREFIX = ".lmeval-prune-"  # prefix of temporary folders and locks
_WRITER = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}(?P<system>\w+)-(?P<process>\d+)-(?P<began>\d+)-\w+")
_FORGOTTEN = 7 * 24 * 3600  # seconds without a write, after which the folder of a writer on another system is removed
_GRACE = 0.2  # seconds; a process that clears a folder holds its locks for a moment
# remedy for NaN or infinite values that a model has computed
NONFINITE_REMEDY = "the model computes what its type cannot hold: give its weights in float32 or bfloat16"
_TRIES = 20  # attempts to create a folder
_LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_LONGEST = 200  # bytes of a name; file systems allow 255, and a suffix may follow
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
def output_lock(path: PathLike, timeout: float = _GRACE) -> Iterator[None]:
    """Lock an output file or folder against other processes and threads.

    Args:
        path: of the file or folder; it need not exist.
        timeout: seconds to wait for another writer; -1: until it ends.

    Raises:
        InputError: another process or thread writes there, or nothing can be written there.
    """
    with ExitStack() as stack:
        with report_write_errors(path):
            try:
                target = Path(path).resolve()
                inside = target.is_dir() and not os.access(target.parent, os.W_OK)
                lock = lock_path(target / target.name if inside else target)
                stack.enter_context(_within(lock.parent, lambda: file_lock(lock, timeout, again=True)))
            except Timeout:
                raise InputError(f"another run is writing to {path}; wait for it, or name another output") from None
            except RuntimeError as error:  # a loop of links
                raise InputError(f"{path} cannot be written: {error}") from error
            _clear(lock.parent, os.getpid())
        yield


def lock_path(path: Path) -> Path:
    """Return the path of the lock beside a file or folder."""
    return path.parent / f"{TEMPORARY_PREFIX}{file_name(path.name)}.lock"


@contextmanager
def file_lock(path: Path, timeout: float = _GRACE, again: bool = False) -> Iterator[None]:
    """Hold a lock file, which is removed at the end. If the file system has no locks, warn once and go on.

    Args:
        path: of the lock file.
        timeout: seconds to wait for another holder; -1: until it ends.
        again: whether the same thread may hold the lock already; otherwise any thread may end the block.

    Raises:
        Timeout: another process or thread holds the lock.
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
    """Enter a block that needs a folder: create it, and remove it at the end if it was created and is empty."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    with ExitStack() as stack:
        for parent in reversed(missing):
            stack.callback(_remove_empty, parent)
        yield create_folder(folder, lambda: stack.enter_context(block()))


def create_folder(folder: Path, then: Callable[[], T] = lambda: None) -> T:  # type: ignore[assignment,return-value]
    """Create a folder with its parents and call `then`; repeat if another process removed the empty folder."""
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


# --------------------------------------------------------------------------- leftovers of a kill


@functools.lru_cache(maxsize=1024)
def _clear(folder: Path, process: int) -> None:
    """Remove the leftovers of ended writers from a folder, once in each process."""
    for left in folder.glob(f"{TEMPORARY_PREFIX}*"):
        with suppress(Timeout, OSError):
            if left.suffix == ".lock":
                with file_lock(left, timeout=0):
                    pass
            elif os.access(left, os.W_OK) and _is_dead(left):
                shutil.rmtree(left, ignore_errors=True)


def _is_dead(temporary: Path) -> bool:
    """Return whether the writer of a folder has ended; for another system, whether it has not written for a week."""
    writer = _WRITER.fullmatch(temporary.name)
    if writer is None or writer["system"] != _system():
        newest = max(part.lstat().st_mtime for part in (temporary, *temporary.rglob("*")))
        return time.time() - newest > _FORGOTTEN
    try:
        return abs(_began(int(writer["process"])) - int(writer["began"])) > 2
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _began(process: int) -> int:
    """Return the start of a process in seconds after the boot, so that changes of the clock have no effect."""
    boot = psutil.boot_time()
    return round(psutil.Process(process).create_time() - boot)


@functools.cache
def _system() -> str:
    """Return a name of the system that numbers the processes: host, boot and container."""
    parts = [platform.node()]
    with suppress(OSError):  # these exist on Linux alone
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), str(Path("/proc/self/ns/pid").readlink())]
    return digest(parts)[:8]


@functools.lru_cache(maxsize=1)
def _prefix(process: int) -> str:
    return f"{TEMPORARY_PREFIX}{_system()}-{process}-{_began(process)}-"


# --------------------------------------------------------------------------- writing


def write_text(path: PathLike, text: str) -> None:
    """Write a text file; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: PathLike, content: bytes) -> None:
    """Write a file atomically: a reader sees the old content or the new one, never a part.

    Raises:
        InputError: the path is a folder, or its folder cannot be created or written.
        DiskError: the disk is full or refuses files.
    """
    with new_file(path) as temporary, report_write_errors(path):
        temporary.write_bytes(content)


def check_writable(path: PathLike, folder: bool = False) -> None:
    """Refuse an output path that cannot be written, before the work begins.

    Args:
        path: of a file or folder.
        folder: whether it is the path of a folder, as for `new_folder`; otherwise of a file, as for `write_bytes`.

    Raises:
        InputError: the path cannot be written.
    """
    with _temporary_path(Path(path).resolve() if folder else Path(path), folder):
        pass


@contextmanager
def new_file(path: PathLike) -> Iterator[Path]:
    """Write a large file atomically: it appears complete, when the block ends.

    Yields:
        A temporary path to write to. If the block raises, the old file stays. Its exception is passed on, unless the
        disk is full.

    Raises:
        InputError: the path cannot be written.
        DiskError: the disk is full or refuses files.
    """
    with _temporary_path(Path(path)) as temporary:
        with _room(path):
            yield temporary
        with report_write_errors(path):
            _sync(temporary)
            temporary.replace(path)


@contextmanager
def new_folder(path: PathLike, check: Callable[[Path], object] | None = None) -> Iterator[Path]:
    """Write a folder atomically: it appears complete, when the block ends, and replaces an existing folder.

    On systems that cannot exchange two names in one call, a kill between two renames leaves the old folder as
    `.NAME.before`; the next call restores it. The path is locked during the block.

    Args:
        path: of the folder, or of a link to it.
        check: called with the path, at the beginning and just before the replacement; it may raise to refuse it.

    Yields:
        A temporary path to write to. If the block raises, the old folder stays.

    Raises:
        InputError: the folder cannot be written, or another process is writing it.
        DiskError: the disk is full or refuses files.
    """
    path = Path(path).resolve()
    with _temporary_path(path, folder=True) as temporary, output_lock(path):
        if _before(path).is_dir() and not path.exists():
            _before(path).replace(path)
        if check:
            check(path)
        with report_write_errors(path):
            temporary.mkdir()
        with _room(path):
            yield temporary
        with report_write_errors(path):
            mode = temporary.stat().st_mode & 0o666
            for part in [*temporary.rglob("*"), temporary]:
                if part.is_file():
                    part.chmod(mode)  # weights are written for their owner only
                _sync(part)
            if check:
                check(path)
            _replace_folder(temporary, path)


def final_path(temporary: Path) -> Path:
    """Return the final path of a temporary file or folder; other paths are returned unchanged."""
    return (
        temporary.parent.with_name(temporary.name) if temporary.parent.name.startswith(TEMPORARY_PREFIX) else temporary
    )


def open_append(path: Path) -> IO[str]:
    """Open a text file to append to.

    Raises:
        InputError: the path is a symbolic link.
    """
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InputError(f"{path} is a link, and is not written to; remove it, or name another folder") from None


@contextmanager
def _temporary_path(path: Path, folder: bool = False) -> Iterator[Path]:
    """Yield a path of the same name in a temporary folder of this process."""
    with ExitStack() as stack:
        with report_write_errors(path):
            if path.is_dir() and not folder:
                raise InputError(f"{path} is a folder; name a file in it")
            if path.is_file() and folder:
                raise InputError(f"{path} is a file; name a folder")
            parent = path.parent.absolute()
            own_folder = stack.enter_context(_within(parent, lambda: _own_folder(parent)))
        yield own_folder / path.name


@contextmanager
def _own_folder(parent: Path) -> Iterator[Path]:
    """Create a temporary folder whose name identifies this process, and remove it at the end."""
    _clear(parent, os.getpid())
    folder = Path(tempfile.mkdtemp(prefix=_prefix(os.getpid()), dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _room(path: PathLike) -> Iterator[None]:
    """Turn an error of a full disk into a `DiskError` of one line."""
    try:
        yield
    except Exception as error:
        if refusal := disk_error(error, path):
            raise refusal from error
        raise


def _replace_folder(temporary: Path, path: Path) -> None:
    """Move a temporary folder to its final path, and an existing folder out of it."""
    if not path.exists() or not any(path.iterdir()):
        temporary.replace(path)
    elif not _exchange(temporary, path):  # no such call on this system: for a moment the path does not exist
        shutil.rmtree(_before(path), ignore_errors=True)
        path.replace(_before(path))
        try:
            temporary.replace(path)
        except OSError:
            _before(path).replace(path)
            raise
        shutil.rmtree(_before(path))


def _before(path: Path) -> Path:
    return path.parent / f".{path.name}.before"


def _exchange(path: Path, other: Path) -> bool:
    """Exchange two names in one call; return whether the system can."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_cwd, exchange = -100, 2
    return call(at_cwd, os.fsencode(path), at_cwd, os.fsencode(other), exchange) == 0


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_artefact(path: PathLike, schema: str, version: int, content: dict[str, Any]) -> None:
    """Write a JSON artefact: `content` with its schema, the schema's version and the program's version."""
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
        version: the newest version that can be read.
        fields: type of the content, as for `validate_json`.

    Returns:
        Its content, and the SHA-256 of the bytes that were read.

    Raises:
        InputError: the file is missing, is not JSON (a pickle is refused without being read), is
            another kind of artefact, is newer than this program, or lacks fields, or has them of other types.
    """
    path = Path(path)
    data = _bytes_of(path)
    content = parse_json(data, path)
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
    return validate_json(content, fields, path), hashlib.sha256(data).hexdigest()


def read_json(path: PathLike, fields: Any = dict[str, Any]) -> Any:
    """Read a JSON file and check the type of its value, as `validate_json` does.

    Raises:
        InputError: the file is missing, is no JSON, or has a value of another type.
    """
    return validate_json(parse_json(_bytes_of(Path(path)), path), fields, path)


def read_lines(path: PathLike, fields: Any = dict[str, Any]) -> list[Any]:
    """Read a JSON Lines file and check the type of each value, as `validate_json` does.

    Raises:
        InputError: the file is missing, or a line is no JSON or has a value of another type.
    """
    if not Path(path).is_file():
        raise InputError(f"no such file: {path}")
    lines = Path(path).read_bytes().split(b"\n")
    named = ((line, f"line {number} of {path}") for number, line in enumerate(lines, 1) if line.strip())
    return [validate_json(parse_json(line, name), fields, name) for line, name in named]


def parse_json(data: bytes | str, path: object) -> Any:
    """Return the value of a JSON text; numbers with thousands of digits and very deep nesting are refused.

    Raises:
        InputError: the text is no JSON; the message names `path`.
    """
    import pydantic_core

    try:
        return pydantic_core.from_json(data)
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None


def validate_json(value: Any, kind: Any, path: object) -> Any:
    """Return a JSON value after pydantic has checked its type, e.g. `list[str]` or a `TypedDict`.

    Raises:
        InputError: the value has another type; the message names `path` and the field.
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
        sha256: hash of its content in the artefact beside it; None: not checked.

    Raises:
        InputError: the file cannot be read, has another hash, or has NaN or infinite values.
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
    """Read a parquet file as an Arrow table, and validate all of it.

    Args:
        path: of the file.
        remedy: the message's advice for a damaged file.
        columns: the needed columns; default: all, or those of the schema.
        schema: types to which the columns are cast.
        optional: columns of the schema that are null where the file lacks them.

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: the file is damaged.
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
    """Refuse tensors with NaN or infinite values.

    Args:
        tensors: tensors by name.
        name: name of their file or model, for the message.
        remedy: the message's advice.

    Raises:
        InputError: a tensor has such values; the message names the first one.
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

    Names that begin with a dot (locks, temporary files) and the path of the file or folder do not count.
    """
    path = Path(path)
    if path.is_dir():
        named = [(file.relative_to(path).as_posix(), file) for file in sorted(path.rglob("*")) if file.is_file()]
        return digest([[name, content_digest(file)] for name, file in named if not re.search(r"(^|/)\.", name)])
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
