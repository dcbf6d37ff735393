"""Folders of work that is written over time, and goes on where it was: the one rule of what may be used again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmeval_prune.artefacts.locks import file_name
from lmeval_prune.artefacts.reading import read_json, read_tensors
from lmeval_prune.artefacts.writing import write_bytes, write_text
from lmeval_prune.errors import InputError

SETTINGS = "settings.json"


class Work:
    """A folder of finished parts, for a run that may be killed at any moment.

    `settings.json` holds everything that the parts depend on: resolved options, digests of model and data. With the
    same settings, a run uses what is there. With others, `restart` deletes it; else an `InputError` names the first
    setting that differs. Nothing is written before `begin`, or the first part.

    Args:
        folder: may not exist yet.
        settings: a JSON value.
        restart: whether parts of other settings, or of a damaged `settings.json`, are deleted.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], restart: bool = False) -> None:
        self.folder, self.settings = folder, json.loads(json.dumps(settings))
        if not restart and not (folder / SETTINGS).is_file():
            return
        try:
            check_same(read_json(folder / SETTINGS), self.settings, folder)
        except InputError:
            if not restart:
                raise
            self.remove()  # also what is left of a removal that was killed

    def begin(self) -> None:
        """Write the settings."""
        if not (self.folder / SETTINGS).exists():
            write_text(self.folder / SETTINGS, json.dumps(self.settings, indent=1) + "\n")

    def path(self, name: str, ending: str = "safetensors") -> Path:
        """Return the path of a part, whose name may have any characters."""
        return self.folder / f"{file_name(name)}.{ending}"

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
        """Delete the folder."""
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
