"""Trainings that can be killed: what they keep beside their output, and where they go on."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from typing_extensions import TypedDict

from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.errors import InputError, disk_error

OPTIONS = "options.json"  # in the folder of a training that is not complete
LITTLE = 2**30  # free bytes of a disk on which a checkpoint that torch could not write is taken for one too many


class _TrainerState(TypedDict):
    """Fields that are read of `trainer_state.json`."""

    global_step: int


def settings_of(options: Any) -> dict[str, Any]:
    """Return as JSON the options that the result depends on: all but where things are."""
    return {
        name: value
        for name, value in json.loads(json.dumps(asdict(options))).items()
        if name not in ("output", "data_dir")
    }


def refuse_other(settings: Mapping[str, Any], known: Mapping[str, Any], folder: Path) -> None:
    """Refuse a folder that was made with other options.

    Raises:
        InputError: naming some of them.
    """
    differ = [name for name in settings if known.get(name) != settings[name]]
    if differ:
        values = ", ".join(f"{name}={known.get(name)}" for name in differ[:3])
        raise InputError(f"{folder} was made with other options ({values}); name another output, or delete it")


def check_resumable(work: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder of checkpoints that was begun with other options; one that is not there is fine.

    Raises:
        InputError: it was, or its `options.json` is damaged.
    """
    if (work / OPTIONS).is_file():
        refuse_other(settings, read_options(work), work)


def read_options(work: Path) -> dict[str, Any]:
    """Read the options of a training that was begun.

    Raises:
        InputError: the file is damaged.
    """
    try:
        options: dict[str, Any] = read_json(work / OPTIONS)
    except InputError as error:
        raise InputError(f"{error}; delete {work} to begin anew") from error
    return options


def write_options(work: Path, settings: Mapping[str, Any]) -> None:
    """Note with which options a training was begun."""
    write_text(work / OPTIONS, json.dumps(settings, indent=1) + "\n")


def last_checkpoint(work: Path) -> str | None:
    """Find the newest checkpoint that was written to its end, and delete those that were not.

    Its state is the last file that transformers writes of one.
    """
    complete: dict[int, Path] = {}
    for folder in work.glob("checkpoint-*"):
        try:
            complete[read_json(folder / "trainer_state.json", _TrainerState)["global_step"]] = folder
        except InputError:
            shutil.rmtree(folder)
    return str(complete[max(complete)]) if complete else None


@contextmanager
def full_disk_refused(work: Path) -> Iterator[None]:
    """Say in one line that the disk of checkpoints is full; torch and safetensors say it in ways of their own.

    Raises:
        InputError: it is.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if refusal := disk_error(error, work):
            raise refusal from error
        torn = any(word in str(error) for word in ("iostream", "inline_container"))  # of torch.save
        if not (torn and shutil.disk_usage(work).free < LITTLE):
            raise
        raise disk_error(OSError(errno.ENOSPC, ""), work) from error  # type: ignore[misc]
