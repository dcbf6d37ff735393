"""Run a grid: first the preparations, then the cells, until every cell is done or has failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep
from typing import Any

from lmeval_prune.grid.cells import Cell, cells_of
from lmeval_prune.grid.configuration import Grid
from lmeval_prune.grid.distances import distance_key, reference, why_unmeasured
from lmeval_prune.grid.folder import GridFolder, measurement_key
from lmeval_prune.grid.runners import LocalRunner, Runner
from lmeval_prune.grid.worker import BUSY, FAILED, Job

logger = logging.getLogger(__name__)
POLL_SECONDS = 2.0  # between two checks for cells that another run evaluates
REMINDER_SECONDS = 60.0  # between two messages about them
LOADING_ARGUMENTS = ("pretrained", "peft", "dtype", "revision")
MASK_ARGUMENTS = {"heads", "mask"}
UNPREPARED = "its preparation failed"


@dataclass(frozen=True)
class Summary:
    """Result of a run."""

    cells: int  # number of cells of the grid
    new: int  # number of cells that this run evaluated
    failed: list[tuple[str, str, str]]  # variant, task and reason of each failed cell


def run(grid: Grid, output: str, runner: Runner | None = None, retry_failed: bool = False) -> Summary:
    """Evaluate the cells of a grid that are not done; `output` is its folder, the default runner a `LocalRunner`."""
    return _Run(grid, GridFolder(output), runner or LocalRunner()).run(retry_failed)


class _Run:
    def __init__(self, grid: Grid, folder: GridFolder, runner: Runner) -> None:
        self.grid, self.folder, self.runner = grid, folder, runner
        self.cells = cells_of(grid)
        self.model_args = {cell.key: cell.model_args(folder.prepared) for cell in self.cells}
        self.names = {measurement_key(cell.costs): f"costs of {cell.variant.name}" for cell in self.cells}
        self.names |= {cell.key: cell.name for cell in self.cells}
        self.origins: dict[str, Cell] = {}  # cell from whose model the distance of another is measured, by key
        self.distances: dict[str, dict[str, str]] = {}  # fields of `CellEntry` by cell
        if grid.distance:
            self._plan_distances()
        self.names |= {key: f"distance of {self.names[cell]}" for cell, key in self.distance_keys.items()}

    def _plan_distances(self) -> None:
        baseline = self.grid.baseline or self.grid.variants[0].name
        bases = {cell.task.name: cell for cell in self.cells if cell.variant.name == baseline}
        for cell in self.cells:
            base = bases[cell.task.name]
            origin = reference(cell, base)
            if origin is None:
                continue
            if reason := why_unmeasured(cell, base):
                self.distances[cell.key] = {"no_distance": reason}
                continue
            self.origins[cell.key] = origin
            self.distances[cell.key] = {"distance": distance_key(cell, self.grid.distance, origin)}
            if origin is not cell:
                self.distances[cell.key]["distance_from"] = baseline

    @property
    def distance_keys(self) -> dict[str, str]:
        """Return the keys of distances by that of their cell."""
        return {cell: entry["distance"] for cell, entry in self.distances.items() if "distance" in entry}

    def run(self, retry_failed: bool) -> Summary:
        folder, cells = self.folder, self.cells
        entries = [cell.entry(self.model_args[cell.key]) | self.distances.get(cell.key, {}) for cell in cells]
        folder.create(self.grid.title, self.grid.baseline, entries)
        if retry_failed:
            keys = {key for cell in cells for key in (cell.key, cell.prepared, measurement_key(cell.costs)) if key}
            for key in keys.union(self.distance_keys.values()):
                folder.clear_failure(key)
        done_before = folder.done_cells().intersection(self.model_args)
        if done_before:
            logger.info("%d of %d cells are done", len(done_before), len(cells))
        try:
            self._prepare(done_before)
            self._run_jobs(self._left, self._jobs)
            self._run_jobs(self._without_distances, partial(self._jobs, distance=self.grid.distance))
        finally:
            self.runner.close()
        done, failures = folder.done_cells(), folder.failures()
        failed = [cell for cell in cells if cell.key not in done]
        reasons = [(cell.variant.name, cell.task.name, failures.get(cell.key, "not run")) for cell in failed]
        return Summary(len(cells), len(cells) - len(failed) - len(done_before), reasons)

    def _left(self) -> list[Cell]:
        """Return the cells that are neither done nor failed, and one cell of each variant without measured costs."""
        done, failures = self.folder.done_cells(), self.folder.failures()
        left = [cell for cell in self.cells if cell.key not in done and cell.key not in failures]
        if self.grid.measure:
            evaluated = {cell.costs for cell in left}
            done_here = [cell for cell in self.cells if cell.key in done and not cell.variant.served]
            unmeasured = {cell.costs: cell for cell in done_here if cell.costs not in evaluated}
            left += [cell for costs, cell in unmeasured.items() if self.folder.needs_costs(costs)]
        return left

    def _without_distances(self) -> list[Cell]:
        """Return the cells that are done, but whose distances are neither measured nor failed."""
        done, failures, keys = self.folder.done_cells(), self.folder.failures(), self.distance_keys
        left = [cell for cell in self.cells if cell.key in done and cell.key in keys]
        finished = {key for key in keys.values() if key in failures or self.folder.has_distances(key)}
        return [cell for cell in left if keys[cell.key] not in finished]

    def _prepare(self, done: set[str]) -> None:
        """Run the preparations; if one fails, its cells are recorded as failed."""
        folder = self.folder
        dependent = [cell for cell in self.cells if cell.prepared and cell.key not in done]
        preparations = {cell.prepared: cell for cell in dependent}
        for key, cell in preparations.items():
            self.names[key] = f"preparation {next(iter(cell.variant.prepare))} of {cell.variant.name}"

        def left() -> list[Cell]:
            finished = folder.failures().keys() | {key for key in preparations if folder.preparation(key).is_dir()}
            return [cell for key, cell in preparations.items() if key not in finished]

        self._run_jobs(left, lambda cells: [Job(str(folder.path), (cell,), prepares=True) for cell in cells])
        failures = folder.failures()
        for key in failures.keys() & preparations.keys():
            if folder.preparation(key).is_dir():
                folder.clear_failure(key)
                del failures[key]
        for cell in dependent:
            if reason := failures.get(cell.prepared):
                folder.record_failure(cell.key, f"{UNPREPARED}: {reason}", "")
            elif failures.get(cell.key, "").startswith(UNPREPARED):  # prepared since then
                folder.clear_failure(cell.key)

    def _run_jobs(self, left: Callable[[], list[Cell]], jobs: Callable[[Sequence[Cell]], Sequence[Job]]) -> None:
        """Run jobs until no cell is left, and wait for cells that another run holds."""
        cells = left()
        total, finished, next_message = len(cells), 0, 0.0
        while cells:
            finished_before = finished
            for result in self.runner.run(jobs(cells)):
                if result.state == BUSY:
                    continue
                finished += 1
                state = f"failed: {result.reason}" if result.state == FAILED else "done"
                logger.info("[%d/%d] %s: %s", finished, total, self.names.get(result.key, result.key), state)
            cells = left()
            if finished == finished_before and cells:
                if monotonic() >= next_message:
                    name = self.names.get(cells[0].key) or cells[0].variant.name
                    logger.info("waiting for another run that holds %d of them, e.g. %s", len(cells), name)
                    next_message = monotonic() + REMINDER_SECONDS
                sleep(POLL_SECONDS)
                cells = left()

    def _jobs(self, cells: Sequence[Cell], distance: int = 0) -> list[Job]:
        """Group cells into jobs: variants of one model on one task that differ only in masks, others singly.

        Jobs of one model are adjacent, and within them the jobs of one task, which share an answer store.
        """
        groups: dict[tuple[Any, ...], list[Cell]] = {}
        order: dict[Any, int] = {}  # models and tasks, in the order of the grid
        for cell in cells:
            arguments = {name: str(value) for name, value in self.model_args[cell.key].items()}
            model = tuple(arguments.get(name) for name in LOADING_ARGUMENTS)
            others = tuple(sorted((name, value) for name, value in arguments.items() if name not in MASK_ARGUMENTS))
            position = order.setdefault(model, len(order)), order.setdefault(cell.task.name, len(order))
            origin = self.origins[cell.key] if distance else cell
            origin_key = "" if origin is cell else origin.key
            groups.setdefault((position, others, cell.variant.seed, origin_key), []).append(cell)
        size = self.grid.together
        return [
            Job(
                str(self.folder.path),
                tuple(group[start : start + size]),
                measures=self.grid.measure and not group[0].variant.served,
                distance=distance,
                origin=self.origins[group[0].key] if origin_key else None,
            )
            for (*_, origin_key), group in sorted(groups.items(), key=lambda item: item[0][0])
            for start in range(0, len(group), size)
        ]
