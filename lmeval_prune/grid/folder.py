"""Folder of a grid: the list of its cells, and what is done.

    grid.json                   all cells of the grid as of the last run
    cells/KEY/                  a cell, as `lm_eval --log_samples --output_path` writes it: results_KEY.json and
                                samples_TASK_KEY.jsonl; and cell.json with its settings
    prepared/KEY/               result of a preparation
    measures/KEY.json           costs of a variant
    distances/KEY.parquet       distances of a cell's variant from a dense model, by text
    failed/KIND-KEY.json        reason why one of these could not be made
    answers/answers.servers.json  log-probabilities by which servers are known again
    answers/NAME/               answers of a model on a task, stored one by one, so that a killed cell can resume
    locks/KIND-KEY.lock         held by the process that makes one of these

A result is written completely before it appears.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lmeval_prune.artefacts import ENVELOPE, file_name, read_artefact, read_table, write_artefact
from lmeval_prune.errors import InputError, did_you_mean, first_few

GRID, CELL, FAILED, MEASURE = (f"lmeval-prune/{name}" for name in ("grid", "grid-cell", "grid-failure", "grid-measure"))
VERSION = 1
Kind = Literal["prepare", "evaluate", "measure", "distance"]
PLACES = {
    "prepare": "prepared/{}",
    "evaluate": "cells/{}",
    "measure": "measures/{}.json",
    "distance": "distances/{}.parquet",
}


class GridFolder:
    """The folder of a grid. The first write creates it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._grid_file = self.path / "grid.json"
        self.prepared = self.path / "prepared"

    def create(self, title: str, baseline: str | None, cells: list[dict[str, Any]]) -> None:
        write_artefact(self._grid_file, GRID, VERSION, {"title": title, "baseline": baseline, "cells": cells})

    def read(self) -> dict[str, Any]:
        return read_artefact(self._grid_file, GRID, VERSION)[0]

    def place(self, kind: Kind, key: str) -> Path:
        return self.path / PLACES[kind].format(file_name(key))

    def done(self, kind: Kind) -> set[str]:
        """Return the keys of all results of a kind."""
        folder, ending = self.place(kind, "x").parent, self.place(kind, "x").suffix
        return {path.name.removesuffix(ending) for path in folder.iterdir()} if folder.is_dir() else set()

    def results(self, key: str) -> Path:
        return self.place("evaluate", key) / f"results_{file_name(key)}.json"

    def record_failure(self, name: str, reason: str, trace: str) -> None:
        write_artefact(self._failure(name), FAILED, VERSION, {"reason": reason, "trace": trace})

    def failures(self) -> dict[str, str]:
        """Return the reasons of all failures by the names of items."""
        reasons = {}
        for path in (self.path / "failed").glob("*.json"):
            if path.is_file():  # another run may clear one meanwhile
                reasons[path.stem] = str(read_artefact(path, FAILED, VERSION)[0]["reason"])
        return reasons

    def clear_failure(self, name: str) -> None:
        self._failure(name).unlink(missing_ok=True)

    def _failure(self, name: str) -> Path:
        return self.path / "failed" / f"{file_name(name)}.json"

    def costs(self, key: str) -> dict[str, Any]:
        """Read the costs of a variant; empty if they were not measured."""
        path = self.place("measure", key)
        content = read_artefact(path, MEASURE, VERSION)[0] if path.is_file() else {}
        return {name: value for name, value in content.items() if name not in ENVELOPE}

    def distances(self, key: str) -> Any:
        path = self.place("distance", key)
        return read_table(path).to_pandas()


def reason_missing(entry: dict[str, Any], failures: dict[str, str]) -> str:
    """Return the reason why a cell of `grid.json` is not done."""
    if unprepared := failures.get(f"prepare-{entry['prepared']}"):
        return f"its preparation failed: {unprepared}"
    return failures.get(f"evaluate-{entry['key']}", "not run yet")


def check_name(kind: str, name: str, valid_names: list[str]) -> None:
    """Raise `InputError` for a name that the grid does not have; `kind` is used in the message, e.g. `task`."""
    if name not in valid_names:
        hint = did_you_mean(name, valid_names) or f"; it has {first_few(valid_names)}"
        raise InputError(f"there is no {kind} {name!r} in the grid{hint}")
