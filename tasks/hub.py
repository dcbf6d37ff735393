"""Find the data set on the Hub that a task's questions come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import HFValidationError, validate_repo_id

from lmeval_prune.tasks.splits import split_names

# Names for `datasets.load_dataset` that read files instead of a data set on the Hub.
FILE_FORMATS = frozenset(
    ["arrow", "audiofolder", "csv", "generator", "imagefolder", "json", "pandas", "parquet", "sql", "text", "xml"]
)


@dataclass(frozen=True)
class HubDataset:
    """A data set on the Hub.

    Attributes:
        id: its name.
        config: its configuration; None for the default.
        split: the split of the questions; None if the task names none.
        revision: git revision; None if the task names none.
    """

    id: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None


def hub_dataset(config: Mapping[str, Any], split: str | None = None) -> HubDataset | None:
    """Return the data set of a task, given lm-eval's configuration of it; None if it is not from the Hub.

    Args:
        config: the task's configuration, also as results files have it.
        split: another split than the one of the questions.
    """
    arguments = config.get("dataset_kwargs") or {}
    if name := arguments.get("prune_data"):
        other = (config.get("metadata") or {}).get("data_split")
        return _of_this_package(str(name), split or other or arguments.get("prune_test", "test"))
    path = config.get("dataset_path")
    if not is_on_hub(path) or any(key in arguments for key in ("data_files", "data_dir")):
        return None
    revision = arguments.get("revision")
    questions = config.get("test_split") or config.get("validation_split")
    return HubDataset(str(path), config.get("dataset_name") or None, split or questions, revision)


def dataset_revision(task: Any) -> str | None:
    """Return the git revision of a loaded task's data set on the Hub; None if none, or several, are recorded."""
    splits = task.dataset.values() if isinstance(getattr(task, "dataset", None), Mapping) else ()
    files = [file for split in splits for file in getattr(split.info, "download_checksums", None) or ()]
    revisions = {match[1] for file in files if (match := re.match(r"hf://datasets/[^@]+@([0-9a-f]{40})/", str(file)))}
    return revisions.pop() if len(revisions) == 1 else None


def is_on_hub(path: Any) -> bool:
    """Return whether a `path` for `datasets.load_dataset` is a name on the Hub, not a file format or a local path."""
    if not isinstance(path, str) or path in FILE_FORMATS or path.endswith(".py") or Path(path).exists():
        return False
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True


def _of_this_package(name: str, split: str) -> HubDataset | None:
    from lmeval_prune.tasks.data import DATA, HubSplits  # needs `datasets`, which other tasks need not

    data = DATA.get(name)
    if data is None or not isinstance(data.hub, HubSplits):
        return None
    stored = {part if part in data.files else "all" for part in split_names(split)}
    sources = {data.hub.sources.get(part) for part in stored}
    if len(sources) != 1 or not (source := sources.pop()):
        return None
    return HubDataset(*source, split if split in data.files else None)
