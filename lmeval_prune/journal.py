"""JSON lines that several processes append to, each to a file of its own, and that survive a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmeval_prune.errors import InputError


class Journal:
    """This rank's file in a folder; only one run may write to it.

    Args:
        folder: exists already.
        rank: this process; it alone writes `rank-RANK.jsonl`.

    Raises:
        InputError: another run is writing to it.
        OSError: it cannot be written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank-{rank}.jsonl"
        self._file = self.path.open("a", encoding="utf-8")
        self._lock()
        if self.path.stat().st_size and not _ends_with_newline(self.path):
            self._file.write("\n")  # a line was cut short

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on this system
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"another run is writing to {self.path}; wait for it, or give another folder") from None

    def add(self, record: dict[str, Any]) -> None:
        """Write one line; it is with the operating system when this returns."""
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file and let other runs write."""
        self._file.close()


def read_journals(folder: Path) -> Iterator[dict[str, Any]]:
    """All ranks' lines, but those that a kill cut short."""
    for path in sorted(folder.glob("rank-*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if isinstance(record, dict):
                    yield record


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
