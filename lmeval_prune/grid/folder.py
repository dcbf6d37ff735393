"""A grid's folder: its list of cells, and the cells that are done.

    grid.json                   all cells of the grid as of the last run
    cells/KEY/                  a cell: cell.json, results.json (lm-eval's), samples_TASK.jsonl (lm-eval's),
                                outcomes.parquet and answers.parquet (the same in columns, for comparisons)
    failed/KEY.json             why a cell or a preparation failed; measure-KEY.json: why costs are not known
    prepared/KEY/               the result of a preparation
    measures/KEY.json           what a variant costs
    answers/                    answers as they come, so that a killed cell goes on

A cell's folder appears whole or not at all. The process that evaluates a cell holds its lock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, NotRequired

from annotated_types import Interval, Len, Predicate
from filelock import Timeout
from typing_extensions import TypedDict

from lmeval_prune.artefacts import file_lock, file_name, new_folder, read_artefact, write_artefact
from lmeval_prune.errors import InputError, did_you_mean

GRID, CELL, FAILED, MEASURE = (f"lmeval-prune/{name}" for name in ("grid", "grid-cell", "grid-failure", "grid-measure"))
VERSION = 1


class Entry(TypedDict):
    """Fields of a cell in `grid.json`."""

    key: str
    variant: str
    task: str
    metric: str | None
    selected_on: list[str]
    model_args: dict[str, Any]
    prepare: dict[str, dict[str, Any]]
    costs: str


class Contents(TypedDict):
    """Fields of `grid.json`."""

    title: str
    baseline: str | None
    cells: Annotated[list[Entry], Len(1)]


class Failure(TypedDict):
    """Fields of a failure."""

    reason: str


Finite = Annotated[float, Interval(gt=-math.inf, lt=math.inf)]


class Measure(TypedDict):
    """Costs of a variant."""

    device: NotRequired[str]
    threads: NotRequired[int]
    ranges: NotRequired[dict[str, Annotated[list[Finite], Len(2, 2), Predicate(lambda ends: ends[0] <= ends[-1])]]]
    parameters: NotRequired[Finite | None]
    flops_per_token: NotRequired[Finite | None]
    decode_tokens_per_second: NotRequired[Finite | None]
    prefill_tokens_per_second: NotRequired[Finite | None]
    cache_bytes_per_token: NotRequired[Finite | None]
    weights_bytes: NotRequired[Finite | None]


class GridFolder:
    """The folder of a grid.

    Args:
        path: made when something is written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

    def begin(self, title: str, baseline: str | None, cells: list[dict[str, Any]]) -> None:
        """Write `grid.json`: the cells that the grid is to hold.

        Raises:
            InputError: the folder holds something else, or cannot be written.
        """
        if self.path.is_file():
            raise InputError(f"{self.path} is a file; name a folder")
        files = [file for file in self.path.iterdir() if not file.name.startswith(".")] if self.path.is_dir() else []
        if files and not self._list.exists():  # hidden files are left by a kill, or nobody's
            raise InputError(f"{self.path} holds something that is no grid; name a new folder")
        write_artefact(self._list, GRID, VERSION, {"title": title, "baseline": baseline, "cells": cells})

    def read(self) -> dict[str, Any]:
        """Read `grid.json`.

        Raises:
            InputError: there is no grid.
        """
        if not self._list.is_file():
            if self.path.is_file():
                raise InputError(f"{self.path} is a file; name the folder of a grid")
            raise InputError(
                f"{self.path} holds no grid; `lmeval-prune grid run GRID.yaml --output {self.path}` makes one"
            )
        return read_artefact(self._list, GRID, VERSION, Contents)[0]

    @property
    def _list(self) -> Path:
        return self.path / "grid.json"

    @property
    def prepared(self) -> Path:
        """Folder of the results of preparations."""
        return self.path / "prepared"

    def cell(self, key: str) -> Path:
        """Return the folder of a cell."""
        return self.path / "cells" / file_name(key)

    def answers(self, name: str) -> Path:
        """Return the folder of the answers of one model on one task."""
        return self.path / "answers" / file_name(name)

    def done(self, key: str) -> bool:
        """Return whether a cell is done."""
        return self.cell(key).is_dir()

    def is_prepared(self, key: str) -> bool:
        """Return whether a preparation is done."""
        return (self.prepared / file_name(key)).is_dir()

    def making(self, key: str) -> Any:
        """Return a context that makes a cell's folder; see `new_folder`."""
        return new_folder(self.cell(key))

    def preparing(self, key: str) -> Any:
        """Return a context that makes the folder of a preparation; see `new_folder`."""
        return new_folder(self.prepared / file_name(key))

    @contextmanager
    def lock(self, key: str) -> Iterator[bool]:
        """Hold a cell, a preparation or a measurement; yields False if another process does."""
        folder = self.path / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(file_lock(folder / f"{file_name(key)}.lock", timeout=0))
                is_held = True
            except Timeout:
                is_held = False
            yield is_held

    # ------------------------------------------------------------------ failures and measures

    def fail(self, key: str, reason: str, trace: str) -> None:
        """Record why a cell failed."""
        write_artefact(self._failed(key), FAILED, VERSION, {"reason": reason, "trace": trace})

    def failure(self, key: str) -> str | None:
        """Return why a cell failed, in one line; None if it did not."""
        path = self._failed(key)
        return str(read_artefact(path, FAILED, VERSION, Failure)[0]["reason"]) if path.is_file() else None

    def forget_failure(self, key: str) -> None:
        """Let a cell be tried again."""
        self._failed(key).unlink(missing_ok=True)

    def _failed(self, key: str) -> Path:
        return self.path / "failed" / f"{file_name(key)}.json"

    def write_measure(self, key: str, content: dict[str, Any]) -> None:
        """Write the costs of a variant."""
        write_artefact(self._measure(key), MEASURE, VERSION, content)

    def measure(self, key: str) -> dict[str, Any] | None:
        """Read the costs of a variant, if they were measured."""
        path = self._measure(key)
        return read_artefact(path, MEASURE, VERSION, Measure)[0] if path.is_file() else None

    def needs_measure(self, key: str) -> bool:
        """Return whether the costs of a variant are neither known nor known to be out of reach."""
        return not self._measure(key).is_file() and self.failure(measuring(key)) is None

    def _measure(self, key: str) -> Path:
        return self.path / "measures" / f"{file_name(key)}.json"


def measuring(key: str) -> str:
    """Return the key of a measurement's failure and lock."""
    return f"measure-{key}"


def dumped(value: Any) -> str:
    """Return a value as JSON, as lm-eval writes it."""
    from lm_eval.utils import handle_non_serializable

    return json.dumps(value, default=handle_non_serializable, ensure_ascii=False)


def samples_file(cell: Path, task: str) -> Path:
    """Return the path of lm-eval's samples of a task."""
    return cell / f"samples_{file_name(task)}.jsonl"


def check_name(kind: str, name: str, known: list[str]) -> None:
    """Refuse a name that a grid does not have.

    Raises:
        InputError: naming those that it has.
    """
    if name not in known:
        names = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
        raise InputError(f"there is no {kind} {name!r} in the grid{did_you_mean(name, known) or f'; it has {names}'}")
