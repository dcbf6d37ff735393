"""Expressions of splits, and the split that a task scores: nothing should be chosen by its questions."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)


def split_parts(split: str) -> list[str]:
    """Return the splits and slices of splits in an expression such as `fold0+fold1[:50%]`."""
    return [part.strip() for part in split.split("+")]


def split_names(split: str) -> list[str]:
    return [re.split(r"[\[(]", part, maxsplit=1)[0].strip() for part in split_parts(split)]


def scored_splits(task: Any) -> list[str]:
    """Return the names of the split that a loaded task scores: its test split, or its validation split without one.

    In a task of this package the split has two names: lm-eval's, and that in the data set (`prune_test`).
    """
    arguments = task.get_config("dataset_kwargs") or {}
    own = arguments.get("prune_test", "test") if "prune_data" in arguments else None
    names = {task.get_config("test_split") or task.get_config("validation_split"), own}
    return sorted(str(name) for name in names if name)


def unnamed_exemplar_split(task: Any) -> str | None:
    """Return the split from which lm-eval draws the few-shot examples of a task that does not name one; else None."""
    config = task.get_config("fewshot_config") or {}
    values = config if isinstance(config, dict) else vars(config)  # lm-eval 0.4.13 has made it an object
    if task.get_config("fewshot_split") or values.get("split") or values.get("samples"):
        return None
    return task.get_config("training_split") or task.get_config("validation_split")


def warn_of_scored_splits(source: str, task: str, splits: Iterable[str], scored: Iterable[str], remedy: str) -> None:
    """Warn, in a line for each, of splits that a task scores and that a source of pruning has questions of.

    `splits` are those of the source's questions, or expressions of `tasks.data.load`; `scored` is of `scored_splits`.
    """
    for split in sorted({name for expression in splits for name in split_names(expression)} & {*scored}):
        logger.warning(
            "%s has questions of the split %s, which %s scores: what is pruned is chosen on the test; %s",
            source, split, task, remedy
        )  # fmt: skip
