"""A task manager with this package's tasks that reads lm-eval's index only for names of lm-eval.

lm-eval's index has 14,000 entries and takes about 15 seconds of CPU time; this package's takes 0.1 seconds.
"""

from __future__ import annotations

import logging
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, Kind, TaskIndex

from lmeval_prune.errors import InputError, did_you_mean, first_few, first_line, print_input_errors
from lmeval_prune.tasks.scorers import check_scorers


def with_our_folder(include_path: Any) -> list[str | Path]:
    """Put the package's folder of tasks before the user's folders, unless they include it."""
    paths = list(include_path) if isinstance(include_path, list | tuple) else [include_path] if include_path else []
    folder = Path(__file__).resolve().parent
    return paths if folder in (Path(path).resolve() for path in paths) else [folder, *paths]


def _is_no_notice_of_ours(record: logging.LogRecord) -> bool:
    return not re.match(r"prune_\w+: Custom kwargs", str(record.msg))


def unknown_task_error(names: Sequence[str], task_names: Iterable[str]) -> InputError:
    hint = did_you_mean(names[0], task_names) if len(names) == 1 else ""
    return InputError(
        f"there is no task {', '.join(names)} (`lm_eval ls tasks` lists them, without YAML files that have a mistake; "
        f"of your own, name the YAML file, or its folder by --include_path){hint}"
    )


class LazyTaskManager(TaskManager):
    """The package's tasks, the user's tasks (which replace them) and lm-eval's tasks."""

    def __init__(self, verbosity: str | None = None, include_path: Any = None, metadata: Any = None) -> None:
        logging.getLogger("lm_eval.api.task").addFilter(_is_no_notice_of_ours)
        super().__init__(verbosity, with_our_folder(include_path), include_defaults=False, metadata=metadata)
        self._index: ChainMap[str, Entry] = ChainMap(self._index, LmEvalIndex())  # type: ignore[arg-type]

    @print_input_errors
    def match_tasks(self, task_list: list[str]) -> list[str]:
        """Match names and glob patterns; lm-eval's index is not read for the package's and the user's tasks."""
        index = self._index.maps[0]
        if all(name in index for name in task_list):
            return sorted(set(task_list))
        unknown = [name for name in task_list if re.fullmatch(r"prune_\w+", name) and name not in index]
        if unknown:
            raise unknown_task_error(unknown, index)
        return list(super().match_tasks(task_list))

    @print_input_errors
    def load(self, task_list: Any) -> Any:
        """Load tasks by names or lm-eval's configurations, and check this package's metrics in them."""
        try:
            loaded = super().load(task_list)
        except InputError:
            raise
        except Exception as error:  # data set loaders and functions of tasks raise many types
            tasks = task_list if isinstance(task_list, list) else [task_list]
            names = first_few(task.get("task") if isinstance(task, dict) else task for task in tasks)
            raise InputError(f"{names} cannot be loaded ({first_line(error, 300)})") from error
        for task in loaded["tasks"].values():
            check_scorers(task)
        return loaded

    @property
    def all_tasks(self) -> list[str]:
        return sorted(self._index)

    @property
    def all_groups(self) -> list[str]:
        return self._names(Kind.GROUP)

    @property
    def all_subtasks(self) -> list[str]:
        return self._names(Kind.TASK, Kind.PY_TASK)

    @property
    def all_tags(self) -> list[str]:
        return self._names(Kind.TAG)

    def _names(self, *kinds: Kind) -> list[str]:
        return sorted(name for name, entry in self._index.items() if entry.kind in kinds)

    def _entry(self, name: str) -> Entry | None:
        return None if name.endswith((".yaml", ".yml")) else self._index.get(name)


class LmEvalIndex(Mapping[str, Entry]):
    """lm-eval's index, read on first use, once per process."""

    def __getitem__(self, name: str) -> Entry:
        return _lm_eval_index()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_lm_eval_index())

    def __len__(self) -> int:
        return len(_lm_eval_index())


@cache
def _lm_eval_index() -> dict[str, Entry]:
    index: dict[str, Entry] = TaskIndex.build([Path(lm_eval.tasks.__file__).parent])
    return index
