"""Resume interrupted trainings from the checkpoints and settings beside their output."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from lmeval_prune.artefacts import SETTINGS, check_same, read_json
from lmeval_prune.errors import InputError

logger = logging.getLogger(__name__)

PROBLEMS, PROMPTS, ENCODER = "problems", "task_prompts", "encoder_checkpoint"  # settings that are digests of data


class _TrainerState(TypedDict):
    """Fields of `trainer_state.json` that are read."""

    global_step: int


def result_settings(options: Any) -> dict[str, Any]:
    """Return the options that the result depends on, as JSON: all except paths."""
    return {
        name: value
        for name, value in json.loads(json.dumps(asdict(options))).items()
        if name not in ("output", "data_dir", "responses")
    }


def check_settings(settings: Mapping[str, Any], stored: Mapping[str, Any], made: Path) -> None:
    """Raise an `InputError` if something was made with other settings; `stored` may have more, which are read later."""
    check_same({name: stored.get(name) for name in settings}, settings, made)


def check_contents(contents: Mapping[str, Callable[[], Any]], stored: Mapping[str, Any], made: Path) -> None:
    """Raise an `InputError` if a finished result was made with other contents than those that are read now.

    What cannot be read any more is not compared, with a warning: a result does not need it.
    """
    for name, read in contents.items():
        try:
            now = read()
        except (InputError, OSError) as error:
            logger.warning("whether %s is the same as before is not known: %s", name, error)
        else:
            check_settings({name: now}, stored, made)


def check_resumable(checkpoints: Path, settings: Mapping[str, Any]) -> None:
    """Raise an `InputError` if a folder of checkpoints has other settings."""
    if (checkpoints / SETTINGS).is_file():
        check_settings(settings, read_json(checkpoints / SETTINGS), checkpoints)


def last_checkpoint(checkpoints: Path) -> str | None:
    """Return the newest complete checkpoint, and delete those from which no training resumes.

    `trainer_state.json` is the last file of a checkpoint that transformers writes, also without optimizer states.
    """
    complete: dict[int, Path] = {}
    for folder in checkpoints.glob("checkpoint-*"):
        try:
            step = read_json(folder / "trainer_state.json", _TrainerState)["global_step"]
        except InputError:
            step = None
        if step is None or not any(folder.glob("optimizer*")):
            shutil.rmtree(folder)
        else:
            complete[step] = folder
    return str(complete[max(complete)]) if complete else None
