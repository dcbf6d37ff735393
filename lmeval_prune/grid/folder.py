"""A grid's folder: what it is to hold, and the cells that are done.

    grid.json                   all cells of the grid as it was last asked
    cells/KEY/                  a cell: cell.json, results.json (lm-eval's), samples_TASK.jsonl (lm-eval's),
                                outcomes.parquet and answers.parquet (the same in columns, for comparisons)
    failed/KEY.json             why a cell or a preparation failed; measure-KEY.json: why costs are not known
    prepared/KEY/               the result of a preparation
    measures/KEY.json           what a variant costs
    answers/                    answers as they come, so that a killed cell goes on

A cell's folder appears whole or not at all. Who evaluates a cell holds its lock.
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

from lmeval_prune.artefacts import file_name, held, new_folder, read_artefact, write_artefact
from lmeval_prune.errors import InputError

GRID, CELL, FAILED, MEASURE = (f"lmeval-prune/{name}" for name in ("grid", "grid-cell", "grid-failure", "grid-measure"))
VERSION = 1


class Entry(TypedDict):
    """A cell in `grid.json`."""

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


def is_ordered(ends: list[float]) -> bool:
    """Return whether the first number is no larger than the last."""
    return ends[0] <= ends[-1]


Finite = Annotated[float, Interval(gt=-math.inf, lt=math.inf)]


class Measure(TypedDict):
    """Fields of what a variant costs."""

    device: NotRequired[str]
    threads: NotRequired[int]
    ranges: NotRequired[dict[str, Annotated[list[Finite], Len(2, 2), Predicate(is_ordered)]]]
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
        """Write down what the grid is to hold.

        Raises:
            InputError: the folder holds something else, or cannot be written.
        """
        if self.path.is_file():
            raise InputError(f"{self.path} is a file; name a folder")
        held = [one for one in self.path.iterdir() if not one.name.startswith(".")] if self.path.is_dir() else []
        if held and not self._about.exists():  # what begins with a dot is left by a kill, or nobody's
            raise InputError(f"{self.path} holds something that is no grid; name a new folder")
        write_artefact(self._about, GRID, VERSION, {"title": title, "baseline": baseline, "cells": cells})

    def read(self) -> dict[str, Any]:
        """What `begin` wrote.

        Raises:
            InputError: there is no grid.
        """
        if not self._about.is_file():
            if self.path.is_file():
                raise InputError(f"{self.path} is a file; name the folder of a grid")
            raise InputError(
                f"{self.path} holds no grid; `lmeval-prune grid run GRID.yaml --output {self.path}` makes one"
            )
        return read_artefact(self._about, GRID, VERSION, Contents)[0]

    @property
    def _about(self) -> Path:
        return self.path / "grid.json"

    @property
    def prepared(self) -> Path:
        """Where results of preparations are."""
        return self.path / "prepared"

    def cell(self, key: str) -> Path:
        """Folder of a cell."""
        return self.path / "cells" / file_name(key)

    def answers(self, name: str) -> Path:
        """Store of answers of one model on one task."""
        return self.path / "answers" / file_name(name)

    def done(self, key: str) -> bool:
        """Whether a cell is there."""
        return self.cell(key).is_dir()

    def is_prepared(self, key: str) -> bool:
        """Whether the result of a preparation is there."""
        return (self.prepared / file_name(key)).is_dir()

    def making(self, key: str) -> Any:
        """A block that makes a cell's folder; see `new_folder`."""
        return new_folder(self.cell(key))

    def preparing(self, key: str) -> Any:
        """A block that makes the folder of a preparation; see `new_folder`."""
        return new_folder(self.prepared / file_name(key))

    @contextmanager
    def lock(self, key: str) -> Iterator[bool]:
        """Hold a cell, a preparation or a measure; yields False if somebody else does."""
        folder = self.path / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(held(folder / f"{file_name(key)}.lock", timeout=0))
                mine = True
            except Timeout:
                mine = False
            yield mine

    # ------------------------------------------------------------------ failures and measures

    def fail(self, key: str, reason: str, trace: str) -> None:
        """Record why a cell failed."""
        write_artefact(self._failed(key), FAILED, VERSION, {"reason": reason, "trace": trace})

    def failure(self, key: str) -> str | None:
        """Why a cell failed, in one line; None if it did not."""
        path = self._failed(key)
        return str(read_artefact(path, FAILED, VERSION, Failure)[0]["reason"]) if path.is_file() else None

    def forget_failure(self, key: str) -> None:
        """Let a cell be tried again."""
        self._failed(key).unlink(missing_ok=True)

    def _failed(self, key: str) -> Path:
        return self.path / "failed" / f"{file_name(key)}.json"

    def write_measure(self, key: str, content: dict[str, Any]) -> None:
        """Write what a variant costs."""
        write_artefact(self._measure(key), MEASURE, VERSION, content)

    def measure(self, key: str) -> dict[str, Any] | None:
        """What a variant costs, if it was measured."""
        path = self._measure(key)
        return read_artefact(path, MEASURE, VERSION, Measure)[0] if path.is_file() else None

    def needs_measure(self, key: str) -> bool:
        """Whether what a variant costs is neither known nor known to be out of reach."""
        return not self._measure(key).is_file() and self.failure(measuring(key)) is None

    def _measure(self, key: str) -> Path:
        return self.path / "measures" / f"{file_name(key)}.json"


def measuring(key: str) -> str:
    """By what the measuring of a variant's costs is called, where a cell is called by its key."""
    return f"measure-{key}"


def dumped(value: Any) -> str:
    """JSON as lm-eval writes it."""
    from lm_eval.utils import handle_non_serializable

    return json.dumps(value, default=handle_non_serializable, ensure_ascii=False)


def samples_file(cell: Path, task: str) -> Path:
    """Return where a cell has lm-eval's samples of a task."""
    return cell / f"samples_{file_name(task)}.jsonl"
