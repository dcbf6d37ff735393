"""Folder of a grid: the list of its cells, and the cells that are done.

    grid.json                   all cells of the grid as of the last run
    cells/KEY/                  a cell: cell.json, results.json and samples_TASK.jsonl (both lm-eval's),
                                outcomes.parquet and answers.parquet (the samples in columns, for comparisons)
    failed/KEY.json             reason why a cell or a preparation failed
    failed/measure-KEY.json     reason why the costs of a variant could not be measured
    prepared/KEY/               result of a preparation
    measures/KEY.json           costs of a variant
    distances/KEY.parquet       distances of a cell's variant from a dense model, by text
    answers/answers.servers.json  log-probabilities by which servers are known again
    answers/NAME/               answers of a model on a task, stored one by one, so that a killed cell can resume
    locks/KEY.lock              lock of a cell, a preparation or a measurement

A cell's folder is written completely before it appears. The process that evaluates a cell holds its lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, NotRequired

from annotated_types import Len
from filelock import Timeout
from typing_extensions import TypedDict

from lmeval_prune.artefacts import ENVELOPE, file_lock, file_name, new_folder, read_artefact, read_table, write_artefact
from lmeval_prune.config import Finite
from lmeval_prune.errors import InputError, did_you_mean, first_few
from lmeval_prune.models.answer_store import write_table
from lmeval_prune.models.server_record import RECORD

GRID, CELL, FAILED, MEASURE = (f"lmeval-prune/{name}" for name in ("grid", "grid-cell", "grid-failure", "grid-measure"))
VERSION = 1


class CellEntry(TypedDict):
    """Fields of a cell in `grid.json`; other fields are not checked."""

    key: str  # name of the cell's folder
    variant: str  # name of the variant
    task: str
    metric: str | None  # compared metric; None: the default of the task
    selected_on: list[str]  # tasks whose questions the variant was selected on
    model_args: dict[str, Any]
    prepare: dict[str, dict[str, Any]]  # settings of a preparation, by its name
    costs: str  # key of the variant's measured costs
    distance: NotRequired[str]  # key of the measured distances
    distance_from: NotRequired[str]  # variant whose model they are measured from, if it is another checkpoint
    no_distance: NotRequired[str]  # reason why they are not measured


class GridContents(TypedDict):
    """Fields of `grid.json`."""

    title: str
    baseline: str | None
    cells: Annotated[list[CellEntry], Len(1)]


class Failure(TypedDict):
    """Fields of a file in `failed/` that are read."""

    reason: str


class Costs(TypedDict):
    """Measured costs of a variant; None if a cost cannot be measured."""

    device: NotRequired[str]
    threads: NotRequired[int]
    ranges: NotRequired[dict[str, list[Finite]]]  # slowest and fastest run of each speed
    parameters: NotRequired[Finite | None]
    flops_per_token: NotRequired[Finite | None]
    decode_tokens_per_second: NotRequired[Finite | None]
    prefill_tokens_per_second: NotRequired[Finite | None]
    cache_bytes_per_token: NotRequired[Finite | None]
    weights_bytes: NotRequired[Finite | None]


class GridFolder:
    """The folder of a grid. The first write creates it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._grid_file = self.path / "grid.json"
        self.prepared = self.path / "prepared"

    def create(self, title: str, baseline: str | None, cells: list[dict[str, Any]]) -> None:
        """Write `grid.json` with the cells of the grid."""
        write_artefact(self._grid_file, GRID, VERSION, {"title": title, "baseline": baseline, "cells": cells})

    def read(self) -> dict[str, Any]:
        """Read `grid.json`."""
        return read_artefact(self._grid_file, GRID, VERSION, GridContents)[0]

    @contextmanager
    def lock(self, key: str) -> Iterator[bool]:
        """Hold the lock of a cell, a preparation or a measurement; yield False if another process holds it."""
        folder = self.path / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(file_lock(folder / f"{file_name(key)}.lock", timeout=0))
                is_held = True
            except Timeout:
                is_held = False
            yield is_held

    # ------------------------------------------------------------------ cells and preparations

    def cell(self, key: str) -> Path:
        """Return the folder of a cell."""
        return self.path / "cells" / file_name(key)

    def has_cell(self, key: str) -> bool:
        """Return whether a cell is done."""
        return self.cell(key).is_dir()

    def done_cells(self) -> set[str]:
        """Return the keys of all cells that are done."""
        folder = self.path / "cells"
        return {path.name for path in folder.iterdir()} if folder.is_dir() else set()

    def new_cell(self, key: str) -> AbstractContextManager[Path]:
        """Return a context that writes a cell's folder; see `new_folder`."""
        return new_folder(self.cell(key))

    def preparation(self, key: str) -> Path:
        """Return the folder of a preparation, which exists when it is done."""
        return self.prepared / file_name(key)

    def answers(self, name: str) -> Path:
        """Return the folder with stored answers of one model on one task; `name` is `Cell.answers`."""
        return self.path / "answers" / file_name(name)

    @property
    def servers(self) -> Path:
        """Return the file by which servers of another run are known again."""
        return self.path / "answers" / RECORD

    # ------------------------------------------------------------------ failures and costs

    def record_failure(self, key: str, reason: str, trace: str) -> None:
        """Record the reason of a failure."""
        write_artefact(self._failure(key), FAILED, VERSION, {"reason": reason, "trace": trace})

    def failure(self, key: str) -> str | None:
        """Return the reason of a failure in one line; None without a failure."""
        return _reason(self._failure(key))

    def failures(self) -> dict[str, str]:
        """Return the reasons of all failures by key."""
        reasons = ((path.stem, _reason(path)) for path in (self.path / "failed").glob("*.json"))
        return {key: reason for key, reason in reasons if reason is not None}  # another run may clear one meanwhile

    def clear_failure(self, key: str) -> None:
        """Delete a failure, so that the work is tried again."""
        self._failure(key).unlink(missing_ok=True)

    def _failure(self, key: str) -> Path:
        return self.path / "failed" / f"{file_name(key)}.json"

    def write_costs(self, key: str, content: dict[str, Any]) -> None:
        """Write the costs of a variant."""
        write_artefact(self._costs(key), MEASURE, VERSION, content)

    def costs(self, key: str) -> dict[str, Any] | None:
        """Read the costs of a variant, without the envelope of the file; None if they were not measured."""
        path = self._costs(key)
        if not path.is_file():
            return None
        content, _ = read_artefact(path, MEASURE, VERSION, Costs)
        return {name: value for name, value in content.items() if name not in ENVELOPE}

    def needs_costs(self, key: str) -> bool:
        """Return whether the costs of a variant are still to be measured."""
        return not self._costs(key).is_file() and self.failure(measurement_key(key)) is None

    def _costs(self, key: str) -> Path:
        return self.path / "measures" / f"{file_name(key)}.json"

    def write_distances(self, key: str, table: Any) -> None:
        """Write the distances of a cell, an Arrow table."""
        write_table(self._distances(key), table)

    def distances(self, key: str) -> Any:
        """Read the distances of a cell as a data frame."""
        path = self._distances(key)
        return read_table(path, f"delete {path} and run the grid").to_pandas()

    def has_distances(self, key: str) -> bool:
        """Return whether the distances of a cell are measured."""
        return self._distances(key).is_file()

    def _distances(self, key: str) -> Path:
        return self.path / "distances" / f"{file_name(key)}.parquet"


def _reason(path: Path) -> str | None:
    return str(read_artefact(path, FAILED, VERSION, Failure)[0]["reason"]) if path.is_file() else None


def measurement_key(key: str) -> str:
    """Return the key of the lock and of the failure of a measurement, given the key of the costs."""
    return f"measure-{key}"


def samples_file(cell: Path, task: str) -> Path:
    """Return the path of lm-eval's samples of a task."""
    return cell / f"samples_{file_name(task)}.jsonl"


def check_name(kind: str, name: str, valid_names: list[str]) -> None:
    """Raise `InputError` for a name that the grid does not have; `kind` is used in the message, e.g. `task`."""
    if name not in valid_names:
        hint = did_you_mean(name, valid_names) or f"; it has {first_few(valid_names)}"
        raise InputError(f"there is no {kind} {name!r} in the grid{hint}")
