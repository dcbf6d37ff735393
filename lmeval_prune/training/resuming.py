"""Resume interrupted trainings from the checkpoints and options beside their output."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.errors import InputError

logger = logging.getLogger(__name__)

OPTIONS = "options.json"  # in the folder of an incomplete training
PROBLEMS, PROMPTS, ENCODER = "problems", "task_prompts", "encoder_checkpoint"
# Settings that are digests of what was read, in the words of messages; those of files are by name.
CONTENTS = {
    "pretrained_files": "the model's {}",
    "teacher_files": "the teacher's {}",
    PROBLEMS: "the problems",
    PROMPTS: "the task's prompts or targets",
    ENCODER: "the encoder",
    "prompts_file": "the file of prompts",
}


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


def check_same_settings(settings: Mapping[str, Any], stored: Mapping[str, Any], folder: Path) -> None:
    """Raise an `InputError` if a folder was made with other options or contents."""
    differ = [name for name in settings if stored.get(name) != settings[name]]
    differ = [name for name in differ if name != PROMPTS] or differ  # prompts follow from the other settings, too
    if values := [f"{name}={stored.get(name)}" for name in differ if name not in CONTENTS]:
        raise InputError(
            f"{folder} was made with other options ({', '.join(values[:3])}); name another output, or delete it"
        )
    if names := [name for key in differ for name in _changed_contents(key, stored.get(key), settings[key])]:
        raise InputError(
            f"{folder} was made with other data ({', '.join(names[:3])}); name another output, or delete it"
        )


def check_same_contents(contents: Mapping[str, Callable[[], Any]], stored: Mapping[str, Any], folder: Path) -> None:
    """Raise an `InputError` if a finished result was made with other contents than those that are read now.

    What cannot be read any more is not compared, with a warning: a result does not need it.
    """
    for name in contents:
        try:
            now = contents[name]()
        except (InputError, OSError) as error:
            logger.warning("whether %s are the same as before is not known: %s", CONTENTS[name], error)
        else:
            check_same_settings({name: now}, stored, folder)


def _changed_contents(name: str, before: Any, now: Any) -> list[str]:
    """Return the words for what differs between two digests, or between two sets of digests of files."""
    if not isinstance(now, Mapping):
        return [CONTENTS[name]]
    return [CONTENTS[name].format(file) for file in {**before, **now} if before.get(file) != now.get(file)]


def check_resumable(checkpoints: Path, settings: Mapping[str, Any]) -> None:
    """Raise an `InputError` if a folder of checkpoints has other options."""
    if (checkpoints / OPTIONS).is_file():
        check_same_settings(settings, read_json(checkpoints / OPTIONS), checkpoints)


def write_options(checkpoints: Path, settings: Mapping[str, Any]) -> None:
    """Write the options of a training."""
    write_text(checkpoints / OPTIONS, json.dumps(settings, indent=1) + "\n")


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
