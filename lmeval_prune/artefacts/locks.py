"""Locks of output paths, temporary folders, and the removal of leftovers of killed processes."""

from __future__ import annotations

import functools
import logging
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from errno import ENOLCK, ENOSYS, ENOTSUP, EOPNOTSUPP
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import psutil
from filelock import FileLock, Timeout

from lmeval_prune.artefacts.digests import digest
from lmeval_prune.errors import BusyError, report_write_errors

logger = logging.getLogger(__name__)
TEMPORARY_PREFIX = ".lmeval-prune-"  # of temporary folders and locks
_TEMPORARY_FOLDER = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}(?P<system>\w+)-(?P<process>\d+)-(?P<start>\d+)-\w+")
_STALE_AFTER = 7 * 24 * 3600  # seconds without a write after which a temporary folder of another system is removed
_LOCK_TIMEOUT = 0.2  # seconds; the removal of leftovers holds locks for a moment
_CREATE_ATTEMPTS = 20
_NO_LOCK_SUPPORT = (ENOLCK, ENOSYS, ENOTSUP, EOPNOTSUPP)
_MAX_NAME_BYTES = 200  # file systems allow 255; a suffix may follow
T = TypeVar("T")


def file_name(name: str) -> str:
    """Convert a name (of a task, a variant, …) to a file name that stays in its folder.

    Ordinary names are unchanged. Separators, unprintable characters and a leading dot are percent-encoded (`%2F`).
    The end of a long name is replaced by a digest.
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


# --------------------------------------------------------------------------- locks


@contextmanager
def output_lock(path: str | os.PathLike[str], timeout: float = _LOCK_TIMEOUT) -> Iterator[None]:
    """Lock an output file or folder against other processes and threads.

    Args:
        path: the file or folder; it need not exist.
        timeout: seconds to wait for another writer; -1 waits without limit.
    """
    with ExitStack() as stack:
        with report_write_errors(path):
            try:
                target = Path(path).resolve()
                has_read_only_parent = target.is_dir() and not os.access(target.parent, os.W_OK)
                lock = lock_path(target / target.name if has_read_only_parent else target)
                stack.enter_context(in_folder(lock.parent, lambda: file_lock(lock, timeout, reentrant=True)))
            except Timeout:
                raise BusyError(f"another run is writing to {path}; wait for it, or name another output") from None
            _remove_leftovers(lock.parent, os.getpid())
        yield


def lock_path(path: Path) -> Path:
    """Return the path of the lock beside a file or folder."""
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


# --------------------------------------------------------------------------- folders


@contextmanager
def in_folder(folder: Path, block: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
    """Enter a block that needs a folder: create it before, and remove it afterwards if it was new and is empty."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    with ExitStack() as stack:
        for parent in reversed(missing):
            stack.callback(_remove_empty, parent)
        yield create_folder(folder, lambda: stack.enter_context(block()))


def cache_folder() -> Path:
    """Return the folder for what can be made again: `LMEVAL_PRUNE_CACHE`, or `lmeval-prune` in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmeval-prune"
    return Path(os.environ.get("LMEVAL_PRUNE_CACHE") or default)


def create_folder(folder: Path, then: Callable[[], T] = lambda: None) -> T:  # type: ignore[assignment,return-value]
    """Create a folder with its parents and call `then`; repeat if another process removed the empty folder."""
    for attempts_left in reversed(range(_CREATE_ATTEMPTS)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return then()
        except (FileNotFoundError, FileExistsError):
            if not attempts_left:
                raise
    raise AssertionError


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Create a temporary folder whose name identifies this process, and remove it at the end."""
    process = os.getpid()
    _remove_leftovers(parent, process)
    folder = Path(tempfile.mkdtemp(prefix=_temporary_prefix(process), dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.lru_cache(maxsize=1)
def _temporary_prefix(process: int) -> str:
    return f"{TEMPORARY_PREFIX}{_system_id()}-{process}-{_start_time(process)}-"


@functools.lru_cache(maxsize=1024)
def _remove_leftovers(folder: Path, process: int) -> None:
    """Remove the leftovers of ended processes from a folder; cached, so that each process does it once per folder."""
    for leftover in folder.glob(f"{TEMPORARY_PREFIX}*"):
        with suppress(Timeout, OSError):
            if leftover.suffix == ".lock":
                with file_lock(leftover, timeout=0):
                    pass
            elif os.access(leftover, os.W_OK) and _is_abandoned(leftover):
                shutil.rmtree(leftover, ignore_errors=True)


def _is_abandoned(temporary: Path) -> bool:
    """Return whether the process of a temporary folder has ended; on another system: whether the folder is stale."""
    writer = _TEMPORARY_FOLDER.fullmatch(temporary.name)
    if writer is None or writer["system"] != _system_id():
        newest = max(part.lstat().st_mtime for part in (temporary, *temporary.rglob("*")))
        return time.time() - newest > _STALE_AFTER
    try:
        return abs(_start_time(int(writer["process"])) - int(writer["start"])) > 2
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _start_time(process: int) -> int:
    return round(psutil.Process(process).create_time() - psutil.boot_time())


@functools.cache
def _system_id() -> str:
    """Identify the system that numbers the processes: host, boot and container."""
    parts = [platform.node()]
    with suppress(OSError):  # only Linux has these files
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), str(Path("/proc/self/ns/pid").readlink())]
    return digest(parts)[:8]
