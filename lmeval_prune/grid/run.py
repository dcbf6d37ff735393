"""Run a grid: preparations, then cells, until all are done or have failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from lmeval_prune.artefacts import digest
from lmeval_prune.grid.cells import Cell, cells_of
from lmeval_prune.grid.configuration import Grid
from lmeval_prune.grid.folder import GridFolder, measuring
from lmeval_prune.grid.runners import Here, Runner
from lmeval_prune.grid.work import BUSY, FAILED, Job

logger = logging.getLogger(__name__)
POLL_SECONDS = 2.0  # between looks at what another run is doing
REMINDER_SECONDS = 60.0  # between messages about it
MASKS = {"heads", "mask"}
UNPREPARED = "its preparation failed"


@dataclass(frozen=True)
class Summary:
    """The end of a run.

    Attributes:
        cells: number of cells of the grid.
        new: number of cells that this run evaluated.
        failed: (variant, task, reason) of the cells that have failed.
    """

    cells: int
    new: int
    failed: list[tuple[str, str, str]]


def run(grid: Grid, output: str, runner: Runner | None = None, retry_failed: bool = False) -> Summary:
    """Evaluate the cells of a grid that are not done.

    Args:
        grid: the grid.
        output: its folder.
        runner: default `Here`.
        retry_failed: try failed cells again.

    Raises:
        InputError: something in the grid does not fit; nothing has been run then.
    """
    progress = _Run(grid, GridFolder(output), runner or Here())
    return progress.run(retry_failed)


class _Run:
    def __init__(self, grid: Grid, folder: GridFolder, runner: Runner) -> None:
        self.grid, self.folder, self.runner = grid, folder, runner
        self.cells = cells_of(grid)
        self.names = {measuring(cell.costs): f"costs of {cell.variant.name}" for cell in self.cells}
        self.names |= {cell.key: cell.name for cell in self.cells}

    def run(self, retry_failed: bool) -> Summary:
        grid, folder, cells = self.grid, self.folder, self.cells
        entries = [_entry(cell, folder) for cell in cells]
        folder.begin(grid.title, grid.baseline, entries)
        if retry_failed:
            for cell in cells:
                for key in (cell.key, cell.prepared or cell.key, measuring(cell.costs)):
                    folder.forget_failure(key)
        before = {cell.key for cell in cells if folder.done(cell.key)}
        if before:
            logger.info("%d of %d cells are there", len(before), len(cells))
        try:
            self._prepare()
            self._until_done(self._left, lambda left: jobs_of(grid, left, folder))
        finally:
            self.runner.close()
        failed = [cell for cell in cells if not folder.done(cell.key)]
        reasons = [(cell.variant.name, cell.task.name, folder.failure(cell.key) or "not run") for cell in failed]
        new = sum(folder.done(cell.key) and cell.key not in before for cell in cells)
        return Summary(len(cells), new, reasons)

    def _left(self) -> list[Cell]:
        """Return the cells that are neither done nor failed, and one for each variant that is to be measured."""
        done = {cell.key for cell in self.cells if self.folder.done(cell.key)}
        left = [cell for cell in self.cells if cell.key not in done and self.folder.failure(cell.key) is None]
        if self.grid.measure:
            coming = {cell.costs for cell in left}
            measured = {cell.costs: cell for cell in self.cells if cell.key in done and cell.costs not in coming}
            left += [cell for costs, cell in measured.items() if self.folder.needs_measure(costs)]
        return left

    def _prepare(self) -> None:
        """Make what cells need; cells whose preparation fails fail with it."""
        folder = self.folder
        needed = {cell.prepared: cell for cell in self.cells if cell.prepared and not folder.done(cell.key)}
        for key, cell in needed.items():
            self.names[key] = f"preparation {next(iter(cell.variant.prepare))} of {cell.variant.name}"

        def left() -> list[Cell]:
            return [cell for key, cell in needed.items() if not folder.is_prepared(key) and not folder.failure(key)]

        self._until_done(left, lambda cells: [Job(str(folder.path), (cell,), prepares=True) for cell in cells])
        for key in filter(folder.is_prepared, needed):
            folder.forget_failure(key)
        for cell in self.cells:
            if cell.prepared not in needed or folder.done(cell.key):
                continue
            if reason := folder.failure(cell.prepared):
                folder.fail(cell.key, f"{UNPREPARED}: {reason}", "")
            elif (folder.failure(cell.key) or "").startswith(UNPREPARED):  # it has been made since
                folder.forget_failure(cell.key)

    def _until_done(self, left: Callable[[], list[Cell]], jobs: Callable[[Sequence[Cell]], Sequence[Job]]) -> None:
        """Run jobs until no cell is left, and wait for cells that another run has."""
        total, ended, next_message = len(left()), 0, 0.0
        while cells := left():
            before = ended
            for finished in self.runner.do(jobs(cells)):
                if finished.state == BUSY:
                    continue
                ended += 1
                state = f"failed: {finished.reason}" if finished.state == FAILED else "done"
                logger.info("[%d/%d] %s: %s", ended, total, self.names.get(finished.key, finished.key), state)
            if ended == before and (cells := left()):
                if monotonic() >= next_message:
                    name = self.names.get(cells[0].key) or cells[0].variant.name
                    logger.info("waiting for another run that has %d of them, e.g. %s", len(cells), name)
                    next_message = monotonic() + REMINDER_SECONDS
                sleep(POLL_SECONDS)


def _entry(cell: Cell, folder: GridFolder) -> dict[str, Any]:
    """Return a cell's entry in `grid.json`: what comparing needs without opening the cell."""
    return {"key": cell.key, **cell.entry(), "costs": cell.costs, "command": cell.command(folder.prepared)}


def jobs_of(grid: Grid, cells: Sequence[Cell], folder: GridFolder) -> list[Job]:
    """Put cells into jobs: variants of one model on one task that are only masks together, others alone.

    Jobs of one model stand side by side, in the order of the grid.
    """
    models: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        arguments = cell.model_args(folder.prepared)
        loading = digest([str(arguments.get(name)) for name in ("pretrained", "peft", "dtype", "revision")])
        unmasked = sorted((name, str(value)) for name, value in arguments.items() if name not in MASKS)
        group = digest([unmasked, cell.task.name, cell.variant.seed])
        models.setdefault(loading, {}).setdefault(group, []).append(cell)
    return [
        Job(str(folder.path), part, measures=grid.measure)
        for groups in models.values()
        for group_cells in groups.values()
        for part in _parts(group_cells, grid.together)
    ]


def _parts(cells: list[Cell], size: int) -> Iterator[tuple[Cell, ...]]:
    for start in range(0, len(cells), size):
        yield tuple(cells[start : start + size])
