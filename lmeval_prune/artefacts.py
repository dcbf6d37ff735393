"""Read and write artefacts: digests, typed fields, locks, atomic writes, folders of resumable work; no pickle.

A file or folder is written in a temporary folder `.lmeval-prune-…` beside its path, and renamed when it is complete.
The writer holds a lock in this folder. The first write of a process in a folder removes the leftovers of killed
processes: temporary folders and locks that nobody holds.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from errno import ENOLCK, ENOSYS, ENOTSUP, EOPNOTSUPP
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from filelock import FileLock, Timeout

from lmeval_prune import __version__
from lmeval_prune.errors import InputError, check_exists, first_line, report_write_errors

logger = logging.getLogger(__name__)
CREATED_BY = f"lmeval-prune {__version__}"
ENVELOPE = ("schema", "schema_version", "created_by")  # fields of every artefact
NONFINITE_REMEDY = "numbers are outside the range of the model's type: give its weights in float32 or bfloat16"
TEMPORARY_PREFIX = ".lmeval-prune-"  # of temporary folders and locks
SETTINGS = "settings.json"
_LOCK_TIMEOUT = 0.2  # seconds; the removal of leftovers holds locks for a moment
_NO_LOCK_SUPPORT = (ENOLCK, ENOSYS, ENOTSUP, EOPNOTSUPP)
_MAX_NAME_BYTES = 200  # file systems allow 255; a suffix may follow
PathLike = str | os.PathLike[str]


# ---------------------------------------------------------------------- digests and names


def digest(value: Any) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def without_addresses(text: str) -> str:
    """Return the text of a Python object without addresses in memory, which differ in each process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def content_digest(path: PathLike) -> str:
    """Return a digest of a file, or of a folder's file names and contents but for names that begin with a dot."""
    path = Path(path)
    if path.is_dir():
        files = [(file.relative_to(path).as_posix(), file) for file in sorted(path.rglob("*")) if file.is_file()]
        return digest([[name, content_digest(file)] for name, file in files if not re.search(r"(^|/)\.", name)])
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def files_digest(paths: Iterable[Path]) -> str:
    return digest(sorted([path.name, content_digest(path)] for path in paths))


def file_name(name: str) -> str:
    """Convert a name (of a task, a variant, …) to a file name that stays in its folder.

    Separators, unprintable characters and a leading dot are percent-encoded (`%2F`), the end of a long name is replaced
    by a digest.
    """
    text = "".join(
        character
        if character.isprintable() and character not in "/\\%"
        else quote(character, safe="", errors="surrogatepass")
        for character in name
    )
    text = re.sub(r"^\.", "%2E", text) or "%"
    if len(text.encode()) > _MAX_NAME_BYTES:
        text = f"{text.encode()[: _MAX_NAME_BYTES - 17].decode(errors='ignore')}~{digest(name)}"
    return text


# ---------------------------------------------------------------------- reading


def read_artefact(
    path: PathLike, schema: str | tuple[str, ...], version: int, fields: Any = dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """Read a JSON artefact of one of these schemas; return its content and the SHA-256 of the file.

    `fields` is the type of the content; see `validate_json`.
    """
    check_exists(path, file=True)
    data = Path(path).read_bytes()
    content = parse_json(data, path)
    schemas = (schema,) if isinstance(schema, str) else schema
    found = (content.get("schema"), content.get("schema_version")) if isinstance(content, dict) else ("none", None)
    if found[0] not in schemas or found[1] != version:
        kind = f"{str(found[0])[:80]!r} of version {str(found[1])[:40]}"
        raise InputError(f"{path} is not a {' or '.join(schemas)} artefact of version {version} (it is {kind})")
    return validate_json(content, fields, path), hashlib.sha256(data).hexdigest()


def read_json(path: PathLike, fields: Any = dict[str, Any]) -> Any:
    check_exists(path, file=True)
    return validate_json(parse_json(Path(path).read_bytes(), path), fields, path)


def read_lines(path: PathLike) -> list[Any]:
    """Read the lines of a JSON Lines file that are not blank."""
    check_exists(path, file=True)
    lines = enumerate(Path(path).read_bytes().split(b"\n"), 1)
    return [parse_json(line, f"line {number} of {path}") for number, line in lines if line.strip()]


def read_texts(path: PathLike) -> list[str]:
    """Read the texts of a file: the field `text` of each line of a .jsonl file, else the whole file."""
    path = Path(path)
    if path.suffix == ".jsonl":
        return [row["text"] or "" for row in read_lines(path)]
    check_exists(path, file=True)
    if path.suffix in (".json", ".csv", ".tsv"):
        raise InputError(f"{path} is no text; name a text file, or .jsonl with a field `text` in each line")
    return [path.read_text(encoding="utf-8")]


def parse_json(data: bytes | str, path: object) -> Any:
    """Parse a JSON text; numbers with thousands of digits and very deep nesting are refused."""
    import pydantic_core

    try:
        return pydantic_core.from_json(data)
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None


def validate_json(value: Any, kind: Any, path: object) -> Any:
    """Check a JSON value against a type, e.g. `list[str]` or a `TypedDict`, and return it."""
    from pydantic import ValidationError

    try:
        _validator(kind).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part)[:40] for part in first["loc"])
        name = f"field {field!a}" if field else "content"
        raise InputError(f"{path} is damaged or of another kind ({name}: {first['msg'].splitlines()[0]})") from None
    return value


@functools.cache
def _validator(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def read_tensors(path: PathLike, sha256: str | None = None) -> dict[str, Any]:
    """Read tensors from a safetensors file; `sha256` is its hash in the artefact beside it (None: not checked)."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = Path(path).read_bytes()
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise InputError(f"{path} does not belong to the artefact beside it (another SHA-256); make both again")
        tensors = load(data)
    except (OSError, SafetensorError, RuntimeError, KeyError) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}); it belongs to the artefact beside it") from None
    check_finite(tensors, path)
    return tensors


def read_table(path: PathLike, schema: Any = None) -> Any:
    """Read a parquet file as an Arrow table; a `schema` selects and casts columns, a missing file is then empty."""
    from pyarrow import parquet

    if schema is None:
        return parquet.read_table(path)
    return parquet.read_table(path).select(schema.names).cast(schema) if Path(path).exists() else schema.empty_table()


def check_finite(tensors: Mapping[str, Any], name: object, remedy: str = "make it again") -> None:
    """Raise an `InputError` that names `name` and `remedy` if a tensor has NaN or infinite values."""
    for key, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise InputError(f"{name} has NaN or infinite values in {key}; {remedy}")


# ---------------------------------------------------------------------- locks and folders


@contextmanager
def output_lock(path: PathLike, timeout: float = _LOCK_TIMEOUT) -> Iterator[None]:
    """Lock an output file or folder, which need not exist, against other processes and threads.

    `timeout`: seconds to wait for another writer; -1 waits without limit.
    """
    with ExitStack() as stack:
        with report_write_errors(path):
            target = Path(path).resolve()
            has_read_only_parent = target.is_dir() and not os.access(target.parent, os.W_OK)
            lock = lock_path(target / target.name if has_read_only_parent else target)
            lock.parent.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(file_lock(lock, timeout, reentrant=True))
            except Timeout:
                raise InputError(f"another run is writing to {path}; wait for it, or name another output") from None
            _remove_leftovers(lock.parent, os.getpid())
        yield


def lock_path(path: Path) -> Path:
    return path.parent / f"{TEMPORARY_PREFIX}{file_name(path.name)}.lock"


@contextmanager
def file_lock(path: Path, timeout: float = _LOCK_TIMEOUT, reentrant: bool = False) -> Iterator[None]:
    """Hold a lock file and remove it at the end; `Timeout` if another process or thread holds it for `timeout` seconds.

    If the file system has no locks, warn once and continue. `reentrant`: the same thread can take the lock again, and
    no other thread can release it.
    """
    lock = FileLock(path, is_singleton=reentrant, thread_local=reentrant)
    try:
        lock.acquire(timeout=timeout)
    except OSError as error:
        if error.errno not in _NO_LOCK_SUPPORT:
            raise
        _warn_no_locks(error.strerror)
    try:
        yield
    finally:
        if lock.lock_counter <= 1:
            path.unlink(missing_ok=True)
        lock.release()


@functools.cache
def _warn_no_locks(reason: str) -> None:
    logger.warning("the file system has no locks (%s); let no two commands write the same output at once", reason)


def cache_folder() -> Path:
    """Return the folder for what can be made again: `LMEVAL_PRUNE_CACHE`, or `lmeval-prune` in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmeval-prune"
    return Path(os.environ.get("LMEVAL_PRUNE_CACHE") or default)


@functools.lru_cache(maxsize=1024)
def _remove_leftovers(folder: Path, process: int) -> None:
    """Remove what nobody has locked from a folder; cached, so that each process does it once per folder."""
    for leftover in folder.glob(f"{TEMPORARY_PREFIX}*"):
        with suppress(Timeout, OSError):
            if leftover.suffix == ".lock":
                with file_lock(leftover, timeout=0):
                    continue
            handle = os.open(leftover, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover, ignore_errors=True)
            finally:
                os.close(handle)


# ---------------------------------------------------------------------- writing


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
    """Write a large file atomically: yield a temporary path, which becomes the file when the `with` block ends.

    If the block raises, the old file stays.
    """
    with _temporary_path(Path(path)) as temporary:
        with report_write_errors(path, full_disk_only=True):
            yield temporary
        with report_write_errors(path):
            _sync(temporary)
            temporary.replace(path)


@contextmanager
def new_folder(path: PathLike, check: Callable[[Path], object] | None = None) -> Iterator[Path]:
    """Write a folder atomically: yield a temporary path, which replaces the folder when the `with` block ends.

    If the block raises, the old folder stays. The path is locked until then. `check` is called with the path at the
    beginning and just before the replacement, and raises an error to refuse it. Where the system cannot exchange two
    folders in one call, the old folder is renamed to `.NAME.before` for a moment. If the process is killed in this
    moment, the next call restores the old folder.
    """
    path = Path(path).resolve()
    before = path.parent / f".{path.name}.before"
    with _temporary_path(path, folder=True) as temporary, output_lock(path):
        if before.is_dir() and not path.exists():
            before.replace(path)
        if check:
            check(path)
        with report_write_errors(path):
            temporary.mkdir()
        with report_write_errors(path, full_disk_only=True):
            yield temporary
        with report_write_errors(path):
            mode = temporary.stat().st_mode & 0o666
            for part in [*temporary.rglob("*"), temporary]:
                if part.is_file():
                    part.chmod(mode)  # safetensors writes files that only their owner can read
                _sync(part)
            if check:
                check(path)
            if not path.exists() or not any(path.iterdir()):
                temporary.replace(path)
            elif not _exchange(temporary, path):  # rename twice; in between, the path does not exist
                shutil.rmtree(before, ignore_errors=True)
                path.replace(before)
                try:
                    temporary.replace(path)
                except OSError:
                    before.replace(path)
                    raise
                shutil.rmtree(before)


def final_path(temporary: Path) -> Path:
    """Return the final path of a temporary file or folder; other paths are returned unchanged."""
    is_temporary = temporary.parent.name.startswith(TEMPORARY_PREFIX)
    return temporary.parent.with_name(temporary.name) if is_temporary else temporary


def open_append(path: Path) -> IO[str]:
    """Open a text file for appending, but not behind a symbolic link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")


@contextmanager
def _temporary_path(path: Path, folder: bool = False) -> Iterator[Path]:
    """Yield a path with the name of `path` in a temporary folder beside it, which this process has locked.

    The folder gets its name when it is locked. Where folders cannot be locked, those of killed processes stay.
    """
    with report_write_errors(path):
        if path.exists() and path.is_dir() != folder:
            raise InputError(f"{path} is a {'file' if folder else 'folder'}; name another output")
        parent = path.parent.absolute()
        parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(parent, os.getpid())
        unlocked = Path(tempfile.mkdtemp(prefix=f".new{TEMPORARY_PREFIX}", dir=parent))
        handle = os.open(unlocked, os.O_RDONLY)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary = unlocked.rename(parent / unlocked.name.removeprefix(".new"))
    try:
        yield temporary / path.name
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(handle)


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


# ---------------------------------------------------------------------- resumable work


class Work:
    """A folder of finished parts, for a run that may be killed at any moment.

    `settings.json` holds everything that the parts depend on: resolved options, digests of model and data. With the
    same settings, a run uses what is there. With others, `restart` deletes it; else an `InputError` names the first
    setting that differs. Nothing is written before `begin`, or the first part.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], restart: bool = False) -> None:
        self.folder, self.settings = folder, json.loads(json.dumps(settings))
        if not (folder / SETTINGS).is_file():
            self.remove()  # what is left of a removal that was killed
            return
        try:
            check_same(read_json(folder / SETTINGS), self.settings, folder)
        except InputError:
            if not restart:
                raise
            self.remove()

    def begin(self) -> None:
        if not (self.folder / SETTINGS).exists():
            write_text(self.folder / SETTINGS, json.dumps(self.settings, indent=1) + "\n")

    def path(self, name: str) -> Path:
        """Return the path of a part, whose name may have any characters."""
        return self.folder / f"{file_name(name)}.safetensors"

    def tensors(self, name: str) -> dict[str, Any] | None:
        """Return a part of tensors; None if it is missing or damaged."""
        try:
            return read_tensors(self.path(name))
        except InputError:
            return None

    def write_tensors(self, name: str, tensors: Mapping[str, Any]) -> None:
        """Write a part of tensors, which may share memory."""
        from safetensors.torch import save

        self.begin()
        own = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
        write_bytes(self.path(name), save(own))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def check_same(
    before: Mapping[str, Any], now: Mapping[str, Any], made: object, remedy: str = "name another output, or delete it"
) -> None:
    """Raise an `InputError` that names the first field in which the settings of what was made differ from those now."""
    if found := _difference(before, now):
        name, *values = found
        old, new = (str(value)[:60] for value in values)
        raise InputError(f"{made} was made with {name}={old}, now it is {new}; {remedy}")


def _difference(before: Any, now: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return the first field in which two JSON values differ, by names with dots, and its two values; None: none."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        fields = (_difference(before.get(key), now.get(key), f"{name}.{key}") for key in {**before, **now})
        return next(filter(None, fields), None)
    return None if before == now else (name.removeprefix("."), before, now)
